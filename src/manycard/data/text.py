"""Text as streams of tokens in files, mapped into memory and cut into blocks.

Behaviour:
    * Files hold tokens as plain numbers, one after another, as ``array.tofile`` writes them (and as nanoGPT's and
      llm.c's preparation scripts do). Several files are one stream: a block may begin in one and end in the next.
    * Block i holds tokens ``i * block`` to ``(i + 1) * block``, and its targets are the same moved on by one; so each
      token but the stream's first is a target exactly once, and none is a target twice.
    * What is left at the end and fills no block is left out, or with ``pad_last=True`` filled up with targets of -100,
      which ``torch.nn.functional.cross_entropy`` ignores.
    * Nothing is read before a block is asked for, and then only its pages: processes of a machine share them, workers
      own no copies.
    * A file that is missing, empty, not a whole number of tokens long, or has changed since, and a token outside the
      vocabulary, give an error that names the file (and the place in it).

It is a map-style dataset. Order, shuffling, cutting into global batches and resuming are the loader's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from manycard.data.sampler import whole_number
from manycard.errors import DataError, SettingError

__all__ = ["IGNORED", "TokenBlocks", "tokens"]

IGNORED = -100
"""The target that losses of PyTorch ignore."""


def tokens(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    block: int = 1024,
    dtype: Any = "uint16",
    *,
    vocab: int | None = None,
    header: int = 0,
    pad_last: bool = False,
) -> TokenBlocks:
    """A dataset of blocks of tokens, for language models.

    Args:
        paths: a file, or several that are read as one stream, in the order given.
        block: tokens in a sample.
        dtype: what the files hold: an integer type of NumPy.
        vocab: tokens must be below it; each block is checked as it is read. None checks nothing.
        header: bytes at the start of each file that are no tokens.
        pad_last: keep what fills no block at the end, filled up; otherwise it is left out.

    Returns:
        A dataset whose samples are ``(input, target)``, both (block,) of int64.

    Raises:
        DataError: a file can't be used.
        SettingError: a setting has a value that can't work.

    Example:
        >>> np.arange(10, dtype="uint16").tofile("ten.bin")
        >>> blocks = tokens("ten.bin", block=4)
        >>> len(blocks), blocks[1][0].tolist(), blocks[1][1].tolist()
        (2, [4, 5, 6, 7], [5, 6, 7, 8])
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not listed:
        raise SettingError("paths", listed, "there is no file in it", fix="look at the pattern that listed the files")
    kind = _integer_type(dtype)
    if vocab is not None:
        vocab = whole_number("vocab", vocab, 1, "give the number of tokens that the model knows, or leave it out")
    return TokenBlocks(
        [_File.of(Path(path), kind, whole_number("header", header, 0, "give bytes")) for path in listed],
        whole_number("block", block, 1, "give the tokens of a sample, such as block=1024"),
        kind,
        vocab,
        pad_last=bool(pad_last),
    )


def _integer_type(dtype: Any) -> np.dtype[Any]:
    kind: np.dtype[Any] | None = None
    with contextlib.suppress(TypeError):
        kind = np.dtype(dtype)
    if kind is None or kind.kind not in "iu":
        raise SettingError(
            "dtype", dtype, "it is no integer type of NumPy", fix="give what the files were written with, say 'uint16'"
        )
    return kind


@dataclass(frozen=True)
class _File:
    """A file of tokens, as it was when it was looked at first."""

    path: Path
    header: int
    """Bytes before the tokens."""
    tokens: int

    @staticmethod
    def of(path: Path, kind: np.dtype[Any], header: int) -> _File:
        """Look at a file.

        Raises:
            DataError: it is not there, or doesn't hold a whole number of tokens.
        """
        try:
            size = path.stat().st_size - header
        except OSError as error:
            raise DataError(
                f"{path}: {error.strerror or error}", fix="look at the path; tokens() takes files, not folders or globs"
            ) from error
        if path.is_dir():
            raise DataError(f"{path} is a folder", fix="give its files, such as sorted(Path(folder).glob('*.bin'))")
        if size <= 0:
            raise DataError(f"{path} holds no tokens ({max(size, 0)} bytes after the header)", fix="leave it out")
        if size % kind.itemsize:
            raise DataError(
                f"{path} holds {size} bytes of tokens, which is no multiple of the {kind.itemsize} bytes of a {kind}",
                fix="give the dtype it was written with, or header= if it starts with one; it may also be cut short",
            )
        return _File(path, header, size // kind.itemsize)

    def map(self, kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """The file's tokens, mapped.

        Raises:
            DataError: it is no longer what it was.
        """
        try:
            mapped = np.memmap(self.path, dtype=kind, mode="r", offset=self.header, shape=(self.tokens,))
            return mapped.view(np.ndarray)  # slices of a memmap cost more than the copy of a block
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path} has changed since the dataset was made ({error})", fix="make the dataset anew"
            ) from error


class TokenBlocks(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of a stream of tokens; `tokens` makes it."""

    never_draws: ClassVar[bool] = True
    """Samples depend on nothing random, so the loader need not seed each."""

    def __init__(
        self, files: Sequence[_File], block: int, dtype: np.dtype[Any], vocab: int | None, *, pad_last: bool
    ) -> None:
        self.block = block
        self.dtype = dtype
        self.vocab = vocab
        self.pad_last = pad_last
        self._signed = dtype.kind == "i"
        self._files = list(files)
        self._ends = np.cumsum([file.tokens for file in files])
        self._maps: dict[int, np.ndarray[Any, Any]] = {}
        whole, self._left = divmod(self.tokens - 1, block)
        """Blocks that are full, and targets after them."""
        self._blocks = whole + (pad_last and self._left > 0)
        if not self._blocks:
            raise DataError(
                f"{self.paths[0]} holds {self.tokens} tokens, and a block of {block} needs {block + 1} "
                "(targets are one further)",
                fix="give a smaller block, more files or pad_last=True",
            )

    @property
    def paths(self) -> list[Path]:
        """The files, in order."""
        return [file.path for file in self._files]

    @property
    def tokens(self) -> int:
        """Tokens in all files."""
        return int(self._ends[-1])

    def __len__(self) -> int:
        return self._blocks

    def __getstate__(self) -> dict[str, Any]:
        # Pickled maps would be sent to workers as copies.
        return {**self.__dict__, "_maps": {}}

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Block `index`: its tokens (block,) and its targets (block,).

        Raises:
            DataError: it holds a token outside the vocabulary.
        """
        if index < 0:
            index += self._blocks
        if not 0 <= index < self._blocks:
            raise IndexError(f"block {index} of {self._blocks}")
        start = index * self.block
        found = self._read(start, min(start + self.block + 1, self.tokens))
        if self.vocab is not None and (found.max() >= self.vocab or (self._signed and found.min() < 0)):
            raise self._outside(start, found)
        row = torch.from_numpy(found.astype(np.int64))
        if len(row) > self.block:
            return row[:-1], row[1:]
        inputs, targets = row.new_zeros(self.block), row.new_full((self.block,), IGNORED)
        inputs[: len(row)] = row
        targets[: len(row) - 1] = row[1:]
        return inputs, targets

    def _read(self, start: int, end: int) -> np.ndarray[Any, Any]:
        """Tokens `start` to `end` of the stream."""
        parts = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            first = int(self._ends[number]) - self._files[number].tokens
            parts.append(self._map(number)[start - first : end - first])
            start = int(self._ends[number])
            number += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _map(self, number: int) -> np.ndarray[Any, Any]:
        held = self._maps.get(number)
        if held is None:
            held = self._maps[number] = self._files[number].map(self.dtype)
        return held

    def _outside(self, start: int, found: np.ndarray[Any, Any]) -> DataError:
        assert self.vocab is not None, "without a vocabulary nothing is outside"
        at = start + int(np.flatnonzero((found >= self.vocab) | (found < 0))[0])
        number = int(np.searchsorted(self._ends, at, side="right"))
        within = at - (int(self._ends[number]) - self._files[number].tokens)
        return DataError(
            f"{self._files[number].path} has token {int(found[at - start])} at place {within}, and vocab={self.vocab}",
            fix="give the vocabulary of the tokenizer that wrote the file, and the dtype it was written with",
        )
