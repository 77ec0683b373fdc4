"""Low-rank adapters: sections `lora`, layers, rules in the weight map, PEFT folders, engines that keep adapters."""
