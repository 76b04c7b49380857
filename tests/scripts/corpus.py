"""The scripts in ``corpus/`` and what must become of each when it is run on several cards.

They are unmodified single-card scripts in the shapes that people write: none knows of manycard. Each prints a log of
losses, metrics and norms that is the same in every run on one card. What is expected of the same script on several
cards is one of

    same                      it is spread, and its log is that of one card
    same_with_sync_batchnorm  as `same`, with BatchNorm statistics of the whole batch; without, the log differs, said so
    one_card                  cutting its batches would change results, or can't be done: it runs on one card, said so
    differs                   it is spread, but draws (noise, dropout, a coin) in forward: the log differs, said so

`same` does not ask that every call is spread: single observations, samples and evaluation may stay on one card.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

__all__ = ["CORPUS", "FOLDER", "Entry", "Expect"]

FOLDER = Path(__file__).parent / "corpus"
"""Where the scripts are."""

Expect = Literal["same", "same_with_sync_batchnorm", "one_card", "differs"]


@dataclass(frozen=True)
class Entry:
    """One script."""

    name: str
    """Its file's name, without ``.py``."""
    expect: Expect
    """What must become of it on several cards."""
    why: str
    """The reason, or what it tries: a few words."""

    def __post_init__(self) -> None:
        assert self.expect in get_args(Expect), f"{self.name}: {self.expect} is no expectation"

    @property
    def path(self) -> Path:
        """The script."""
        return FOLDER / f"{self.name}.py"


CORPUS: tuple[Entry, ...] = (
    Entry("adaptive_softmax", "same", "mean loss inside"),
    Entry("agent_container", "same", "plain container"),
    Entry("autocast_bf16", "same", "autocast"),
    Entry("bigram_counts", "same", "mean over tokens, logits zero"),
    Entry("calls_forward", "same", "layers alone are called"),
    Entry("char_rnn", "same", "time first"),
    Entry("causal_lm_padded", "same", "loss outside"),
    Entry("checkpointed_blocks", "same", "checkpointed"),
    Entry("clip_features", "same", "0-dim parameter out"),
    Entry("clip_logits_inside", "same", "one side whole"),
    Entry("compiled_model", "same", "compiled"),
    Entry("contrastive_in_batch", "same", "loss outside"),
    Entry("counts_calls", "same", "state by call"),
    Entry("ctc_speech", "same", "time first out"),
    Entry("custom_autograd_function", "same", "custom backward"),
    Entry("custom_collate", "same", "nested dict in"),
    Entry("dataclass_output", "same", "dataclass out"),
    Entry("deep_supervision", "same", "nested list out"),
    Entry("detection_losses_per_image", "same", "list of samples"),
    Entry("diffusion_noise_outside", "same", "noise passed"),
    Entry("digits_mlp", "same", "batch first"),
    Entry("double_precision", "same", "fp64"),
    Entry("dqn_replay", "same", "batches of one"),
    Entry("early_stopping", "same", "state_dict"),
    Entry("ema_model", "same", "copied module"),
    Entry("encode_and_head", "same", "used in parts"),
    Entry("energy_based", "same", "input gradients, frozen meanwhile"),
    Entry("fgsm_adversarial", "same", "input gradients"),
    Entry("finetune_frozen_bn", "same", "stored statistics"),
    Entry("frozen_backbone", "same", "frozen part"),
    Entry("gan_two_optimizers", "same", "two optimizers"),
    Entry("gpt_loss_inside", "same", "mean loss inside"),
    Entry("gpt_tied_weights", "same", "tied weights"),
    Entry("grad_accumulation", "same", "several backwards"),
    Entry("grad_clipping", "same", "gradient hooks"),
    Entry("grad_scaler_off", "same", "loss scaling"),
    Entry("grad_scaler_on", "same", "loss scaling"),
    Entry("gradual_unfreezing", "same", "thawed later"),
    Entry("graph_dense", "same", "batch first"),
    Entry("grown_network", "same", "layers added"),
    Entry("hinge_zero_at_first", "same", "sum inside, zero at first"),
    Entry("hf_model_output", "same", "mean loss inside"),
    Entry("iterable_dataset", "same", "stream"),
    Entry("knowledge_distillation", "same", "frozen teacher"),
    Entry("kwargs_and_flags", "same", "keyword arguments"),
    Entry("label_smoothing", "same", "mixed batch"),
    Entry("lazy_modules", "same", "lazy"),
    Entry("lbfgs_closure", "same", "closure"),
    Entry("loose_layers", "same", "loose layers"),
    Entry("loss_sum", "same", "loss outside"),
    Entry("loss_sum_inside", "same", "sum inside"),
    Entry("lr_schedulers", "same", "parameter groups"),
    Entry("lstm_forecast", "same", "batch first"),
    Entry("maml_sinusoid", "same", "create_graph"),
    Entry("masked_tokens", "same", "rows by the data"),
    Entry("matrix_factorization", "same", "update by hand"),
    Entry("multi_task", "same", "list out"),
    Entry("namedtuple_output", "same", "named tuple out"),
    Entry("neural_ode", "same", "many calls"),
    Entry("nn_data_parallel", "same", "already wrapped"),
    Entry("normalizing_flow", "same", "methods"),
    Entry("packed_in_forward", "same", "lengths beside"),
    Entry("parameters_outside", "same", "parameters outside"),
    Entry("parametrized_weights", "same", "parametrized"),
    Entry("physics_informed", "same", "create_graph"),
    Entry("prints_once_in_forward", "same", "prints inside"),
    Entry("prints_tensors", "same", "outputs as they print"),
    Entry("prototypical_network", "same", "query alone is cut"),
    Entry("proximal_policy", "same", "methods, rollouts between"),
    Entry("pruned_network", "same", "parametrized"),
    Entry("reinforce", "same", "batches of one"),
    Entry("repeated_samples", "same", "repetitions first"),
    Entry("segmentation_unet", "same", "dict out"),
    Entry("seq2seq_attention", "same", "mixed dimensions"),
    Entry("shared_encoder", "same", "shared part"),
    Entry("sharpness_aware", "same", "two gradients a step"),
    Entry("siamese_triplet", "same", "called three times"),
    Entry("sparse_autoencoder", "same", "mean inside"),
    Entry("sparse_embeddings", "same", "sparse gradients"),
    Entry("strings_inside", "same", "head alone is cut"),
    Entry("swa_averaged", "same", "copied module"),
    Entry("sys_exit", "same", "exit status"),
    Entry("text_classifier", "same", "lengths beside"),
    Entry("train_function", "same", "evaluation between"),
    Entry("trainer_class", "same", "callbacks"),
    Entry("transformer_encoder", "same", "mask whole"),
    Entry("transformer_square_batch", "same", "mask looks like a batch"),
    Entry("two_backwards", "same", "retain_graph"),
    Entry("unbatched_calls", "same", "no batch dimension at times"),
    Entry("uneven_batches", "same", "sizes vary"),
    Entry("vae_noise_passed", "same", "noise passed"),
    Entry("vision_cnn", "same", "batch first"),
    Entry("weighted_ignore_loss", "same", "loss outside"),
    Entry("wgan_gradient_penalty", "same", "create_graph"),
    Entry("whole_model_saved", "same", "pickled"),
    Entry("word_language_model", "same", "time first, rows flattened"),
    Entry("yolo_scales", "same", "lists out, cached grid"),
    Entry("batchnorm_cnn", "same_with_sync_batchnorm", "batch statistics"),
    Entry("dcgan_batchnorm", "same_with_sync_batchnorm", "batch statistics"),
    Entry("aux_loss_attribute", "one_card", "state by sample"),
    Entry("bayes_by_backprop", "one_card", "kept tensor with a graph"),
    Entry("counts_in_class", "one_card", "state outside"),
    Entry("counts_samples", "one_card", "state by sample"),
    Entry("detection_losses_per_box", "one_card", "mean over boxes"),
    Entry("embedding_bag_offsets", "one_card", "indices into the batch"),
    Entry("fills_argument", "one_card", "input written"),
    Entry("focal_by_positives", "one_card", "mean over positives, later"),
    Entry("functional_training", "one_card", "torch.func"),
    Entry("gcn_full_batch", "one_card", "one graph"),
    Entry("global_side_effect", "one_card", "state outside"),
    Entry("graph_batch", "one_card", "indices into the batch"),
    Entry("hard_mining_later", "one_card", "coupled later"),
    Entry("hf_padded_labels", "same", "mean over tokens"),
    Entry("hooked_features", "one_card", "hook inside"),
    Entry("meter_inside", "one_card", "state by sample, in objects"),
    Entry("mixup_inside", "one_card", "permutes the batch"),
    Entry("mixture_of_experts", "one_card", "product of means"),
    Entry("modifies_input", "one_card", "input written"),
    Entry("momentum_contrast", "one_card", "buffers by the batch"),
    Entry("packed_input", "one_card", "packed sequence"),
    Entry("packed_padded_output", "one_card", "length of the longest"),
    Entry("pairwise_distances_inside", "one_card", "pairs in the batch"),
    Entry("per_sample_gradients", "one_card", "torch.func"),
    Entry("prints_shape_in_forward", "one_card", "prints the shape"),
    Entry("rare_class_weighted", "one_card", "weighted mean, later"),
    Entry("raw_tensors", "one_card", "no module"),
    Entry("returns_counts", "one_card", "numbers out"),
    Entry("returns_distribution", "one_card", "object out"),
    Entry("softmax_over_batch", "one_card", "normalised over the batch"),
    Entry("stateful_attribute", "one_card", "state by sample"),
    Entry("vq_vae", "one_card", "buffers by the batch"),
    Entry("whitening_inside", "one_card", "normalised over the batch"),
    Entry("diffusion_inside", "differs", "time steps drawn"),
    Entry("dropout_mlp", "differs", "dropout"),
    Entry("teacher_forcing", "differs", "Python's random"),
    Entry("transformer_dropout", "differs", "dropout"),
    Entry("vae_noise_inside", "differs", "noise"),
)
