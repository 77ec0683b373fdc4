"""What a tiny model of a family is described by, and sizes that all of them share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCAB_SIZE = 131
SPREAD = 0.15
"""Of the random values. With 0.3 the gradients of transformers in float32 are off by 2e-5 of their float64 ones, here 3e-6."""


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""What every family's config has unless its own settings say otherwise."""


@dataclass(frozen=True)
class Family:
    """`class_prefix` of transformers' config and model classes, and what this model's config has of its own.

    `linear`: some layers have linear attention.
    """

    class_prefix: str
    settings: dict[str, Any] = field(default_factory=dict)
    num_experts: int | None = None
    model_type: str | None = None
    """What `config.json` calls it, if not as transformers does."""
    linear: bool = False
    small: str | None = None
    """A part of the names of parameters whose random values are a tenth as large."""
    option: str | None = None
    """The option that brings the family; None: `linear_attention` of a linear one, else the core."""
    follows: bool = False
    """Whether some layers must be in the model chunk of the one before."""

    @property
    def comes_with(self) -> str | None:
        """The option without which there is no such family."""
        return self.option or ("linear_attention" if self.linear else None)

    @property
    def norms_less_one(self) -> bool:
        """Whether the weights of norms over the residual stream and over heads are stored less one."""
        return self.class_prefix.startswith(("Qwen3Next", "Qwen3_5", "Gemma2", "Gemma3", "Step3p5"))

    @property
    def needs_reference(self) -> bool:
        """Whether attention scores are capped, or chunks attended to, which only the reference layers do."""
        return self.class_prefix in ("Gemma2", "Gemma4", "Llama4")

    @property
    def in_local_layers(self) -> bool:
        """Whether megatron-core's own layers, which know no positions of a stream, can run its attention."""
        other = self.linear or self.needs_reference or self.class_prefix == "Ministral3"
        return not (other or self.num_experts or self.settings.get("sliding_window"))

    @property
    def kind(self) -> dict[str, bool]:
        """What the layouts it can be split by depend on: experts, their biases, layers that follow others or embeddings."""
        return {
            "experts": self.num_experts is not None,
            "biases": self.class_prefix == "GptOss",
            "follows": self.follows,
            "one_context_rank": self.comes_with == "compressed_attention",
            "one_stage": self.comes_with == "gemma4" and bool(self.settings["hidden_size_per_layer_input"]),
        }

    @property
    def model_class(self) -> Any:
        """The class of the text model: transformers' own, or megarl's of transformers' layers."""
        import transformers

        if self.class_prefix == "Step3p5":
            from megarl.models.step3p5_module import Step3p5ForCausalLM

            return Step3p5ForCausalLM
        if self.class_prefix == "LongcatFlash":
            from megarl.options.shortcut_experts.longcat_flash_module import LongcatFlashForCausalLM

            return LongcatFlashForCausalLM
        return getattr(transformers, f"{self.class_prefix}ForCausalLM")

    @property
    def config_class(self) -> str:
        """transformers' config class of the text model."""
        if self.class_prefix == "Step3p5":
            return "Step3p7TextConfig"
        of_text = self.class_prefix.startswith(("Qwen3_5", "Gemma3", "Gemma4", "Llama4"))
        return f"{self.class_prefix}{'Text' if of_text else ''}Config"
