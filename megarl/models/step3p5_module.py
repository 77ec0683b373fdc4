"""Step 3.5's model of text as transformers lacks it: its layers of Step 3.7's text, and an output layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, Step3p7PreTrainedModel, Step3p7TextConfig, Step3p7TextModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import CausalLMOutputWithPast


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A causal language model; `forward` gives logits `[B, S, V]`."""

    config_class = Step3p7TextConfig
    config: Step3p7TextConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, logits_to_keep: int | Tensor = 0, labels: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        """Logits of the last `logits_to_keep` tokens (0: of all), or of those that it names, and the loss of `labels`."""
        outputs = self.model(input_ids=input_ids, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)


def _of_text(renaming: Any) -> bool:
    """Return whether one of transformers' changes to names of Step 3.7 is about what is inside a layer."""
    return not any(pattern.startswith("^") for pattern in renaming.source_patterns)


AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
register_checkpoint_conversion_mapping(
    "Step3p5ForCausalLM", list(filter(_of_text, get_checkpoint_conversion_mapping("step3p7"))), overwrite=True
)
