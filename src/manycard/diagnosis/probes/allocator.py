"""Probe: can torch read what its CUDA allocator is told, and does it fit together?

Torch reads PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF since 2.9) at the first use of a card, and raises there.

Source: PyTorch, "CUDA semantics", "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF".
"""

from __future__ import annotations

import difflib
import re

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding, Severity

__all__ = ["probe"]

_NEW, _OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_NAMES = """
    backend max_split_size_mb max_non_split_rounding_mb roundup_power2_divisions garbage_collection_threshold
    expandable_segments expandable_segments_handle_type release_lock_on_cudamalloc release_lock_on_hipmalloc
    pinned_use_cuda_host_register pinned_use_hip_host_register pinned_num_register_threads
    pinned_reserve_segment_size_mb pinned_use_background_threads pinned_max_cached_size_mb pinned_max_round_threshold_mb
    pinned_free_catch_all graph_capture_record_stream_reuse large_segment_size_mb per_process_memory_fraction
    throw_on_cudamalloc_oom roundup_bypass_threshold_mb
"""
_KEYS = frozenset(_NAMES.split())
_SWITCHES = frozenset(["expandable_segments", "pinned_use_cuda_host_register", "release_lock_on_cudamalloc"])
_SMALLEST_SPLIT = 21
_SMALL_SPLIT = 64


def probe(facts: Facts) -> list[Finding]:
    """Find settings of the allocator that torch refuses, ignores or that cost speed."""
    old, new = facts.environment.get(_OLD), facts.environment.get(_NEW)
    findings = []
    if old is not None and new is not None and old != new:
        findings.append(
            Finding(
                cause="the CUDA allocator is told two things by two variables, and torch takes one",
                evidence=f"{_NEW}={new}, {_OLD}={old}",
                fix=f"keep {_NEW} (torch 2.9 and newer), and unset the other",
                severity="warning",
            )
        )
    for name, value in ((_NEW, new), (_OLD, old)):
        if value:
            findings += _read(name, value)
    return findings


def _read(name: str, value: str) -> list[Finding]:
    pairs = [part for part in re.split(r",(?![^\[]*\])", value) if part.strip()]
    settings: dict[str, str] = {}
    findings = []
    for pair in pairs:
        key, colon, setting = pair.partition(":")
        key, setting = key.strip(), setting.strip()
        settings[key] = setting
        wrong = _wrong(key, colon, setting)
        if wrong:
            findings.append(
                _finding(f"torch can't read {name} and fails at the first use of a card", name, value, *wrong)
            )
    if not findings:
        findings += _together(name, value, settings)
    return findings


def _wrong(key: str, colon: str, setting: str) -> tuple[str, str] | None:
    """What is wrong with one pair, and the fix."""
    if not colon or not setting:
        hint = f"; a colon stands between, as in {key.replace('=', ':')}" if "=" in key else ""
        return (
            f"{key!r} has no value{hint}",
            "write key:value pairs with commas between, such as expandable_segments:True",
        )
    if key not in _KEYS:
        close = difflib.get_close_matches(key, sorted(_KEYS), n=1)
        return f"{key!r} is no setting of the allocator", f"write {close[0]}" if close else "take it out"
    if key in _SWITCHES and setting not in ("True", "False"):
        return f"{key} is {setting!r}", f"write {key}:True or {key}:False, with a capital"
    if key == "max_split_size_mb" and not (setting.isdecimal() and int(setting) >= _SMALLEST_SPLIT):
        return f"max_split_size_mb is {setting!r}, and must be above 20", "write max_split_size_mb:512, or take it out"
    if key in ("garbage_collection_threshold", "per_process_memory_fraction") and not _is_share(setting):
        return f"{key} is {setting!r}, and must be between 0 and 1", f"write {key}:0.8"
    if key == "backend" and setting not in ("native", "cudaMallocAsync"):
        return f"the backend is {setting!r}", "write backend:native or backend:cudaMallocAsync, or take it out"
    return None


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) < 1
    except ValueError:
        return False


def _together(name: str, value: str, settings: dict[str, str]) -> list[Finding]:
    findings = []
    native = {"expandable_segments", "max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions"}
    if settings.get("backend") == "cudaMallocAsync" and (ignored := sorted(native & settings.keys())):
        findings.append(
            _finding(
                "settings of torch's own allocator are ignored with backend:cudaMallocAsync",
                name,
                value,
                f"ignored: {', '.join(ignored)}",
                "take one or the other",
                "warning",
            )
        )
    if settings.get("expandable_segments") == "True" and "max_split_size_mb" in settings:
        findings.append(
            _finding(
                "max_split_size_mb hardly matters with expandable segments, which leave no large blocks to split",
                name,
                value,
                "both are set",
                "keep expandable_segments:True alone",
                "note",
            )
        )
    if int(settings.get("max_split_size_mb", _SMALL_SPLIT)) < _SMALL_SPLIT:
        findings.append(
            _finding(
                "the allocator may not split blocks above a small size, so it asks the driver for memory often",
                name,
                value,
                f"max_split_size_mb is {settings['max_split_size_mb']}",
                "use expandable_segments:True against fragmentation instead",
                "warning",
            )
        )
    return findings


def _finding(cause: str, name: str, value: str, wrong: str, fix: str, severity: Severity = "error") -> Finding:
    return Finding(cause, f"{name}={value}: {wrong}", fix, severity)
