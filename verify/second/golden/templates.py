#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""What LLaMA-Factory makes of conversations by the templates that demos/prepare.py has by name: verify/second/golden_templates.json.

    pip download --no-deps llamafactory==0.9.5 && unzip -q llamafactory-0.9.5-*.whl -d there
    PYTHONPATH=there python3 verify/second/golden/templates.py > verify/second/golden_templates.json

Needs transformers, datasets, torch and pyyaml beside it. Its parts for images and sound are not loaded: nothing here has any.
"""
import json
import sys
import types

VERSION = "0.9.5"
NAMES = ("llama3", "qwen", "mistral", "zephyr", "chatml")
SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
           "<|end_of_text|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEXTS = {  # system, then what user and assistant say by turns
    "one": ("", ["What is 7 * 6?", "42"]),
    "two": ("Be brief.", ["Hi", "Hello!", "  two blanks, a line\n", "\n\nlines before"]),
    "three": ("", ["eins", "zwei", "drei ", " vier", "fünf 5\n", "sechs"]),
    "odd": ("S\n", ["{{content}} {x} <|im_end|> </s>", "[INST] é 你好 \t"]),
    "empty": ("", ["only asked", ""])}


def bare_packages():
    """Their modules one by one, without what the packages load, and a module in the place of mm_plugin."""
    import pathlib
    folder = next(pathlib.Path(path) / "llamafactory" for path in sys.path if (pathlib.Path(path) / "llamafactory").is_dir())
    for name in ("", ".data", ".data.processor", ".hparams", ".extras"):
        package = types.ModuleType("llamafactory" + name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules["llamafactory" + name] = package
    logging = types.ModuleType("llamafactory.extras.logging")
    logging.get_logger = lambda _: types.SimpleNamespace(**dict.fromkeys(("info_rank0", "warning_rank0", "warning_rank0_once"), lambda *_: None))
    constants = sys.modules["llamafactory.extras.constants"] = types.ModuleType("llamafactory.extras.constants")
    constants.IGNORE_INDEX, constants.DATA_CONFIG = -100, "dataset_info.json"
    misc = sys.modules["llamafactory.extras.misc"] = types.ModuleType("llamafactory.extras.misc")
    misc.use_modelscope = misc.use_openmind = lambda: False
    sys.modules["llamafactory.extras.logging"] = sys.modules["llamafactory.extras"].logging = logging

    class Plain:
        def process_messages(self, messages, *_):
            return messages

        def process_token_ids(self, ids, labels, *_):
            return ids, labels

    module = types.ModuleType("llamafactory.data.mm_plugin")
    module.get_mm_plugin = lambda *_, **__: Plain()
    sys.modules["llamafactory.data.mm_plugin"] = module


def tokenizers():
    """Bytes, and characters with a mark before each text as sentencepiece has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    letters = sorted(set("".join(t for system, said in TEXTS.values() for t in [system, *said]) + "".join(SPECIAL)) | set(
        map(chr, range(33, 127))) | set("\n▁"))
    merges = [("▁", "a"), ("\n", "\n"), ("▁", "▁"), ("l", "i")]
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [("Ċ", "Ċ"), ("Ġ", "l"), ("?", "<"), ("Ċ", "S")]

    def made(words, joins, **more):
        vocabulary = {word: i for i, word in enumerate(["<unk>", *words, *("".join(join) for join in joins)])}
        tokenizer = Tokenizer(models.BPE(vocabulary, joins, unk_token="<unk>"))
        for name, part in more.items():
            setattr(tokenizer, name, part)
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
        return tokenizer

    yield "bytes", made(bytes_, merged, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                        decoder=decoders.ByteLevel())
    yield "marks", made(letters, merges, normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
                        decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]))


def conversation(system, said):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]


def said_as(prompt, said):
    return [{"role": "assistant", "content": said[-1]}]


def learnt(labels):
    return "".join("01"[label != -100] for label in labels)


SAID = {"q": "Q", "i": "I", "a": "A", "s": "S", "h": [["q1", "a1"], ["q2", "a2"]], "good": "G", "bad": "B", "tag": True, "none": None,
        "c": [{"from": "human", "value": "h1"}, {"from": "gpt", "value": "g1"}],
        "o": [{"role": "system", "content": "S2"}, {"role": "user", "content": "u1"}, {"role": "assistant", "content": "a1"}],
        "odd": [{"from": "human", "value": "h1"}], "wrong": [{"from": "gpt", "value": "g1"}, {"from": "human", "value": "h1"}],
        "better": {"from": "gpt", "value": "G"}, "worse": {"from": "gpt", "value": "B"},
        "instruction": "IN", "input": "", "output": "OUT"}
ROLE_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}
INFOS = [  # of dataset_info.json, each with a stage it is for
    ("sft", {}),
    ("sft", {"columns": {"prompt": "q", "query": "i", "response": "a", "system": "s", "history": "h"}}),
    ("sft", {"columns": {"prompt": "q", "query": "none", "response": "a"}}),
    ("sft", {"columns": {"query": "i", "response": "a"}}),
    ("sft", {"columns": {"prompt": "q"}}),
    ("sft", {"formatting": "sharegpt", "columns": {"messages": "c", "system": "s"}}),
    ("sft", {"formatting": "sharegpt", "columns": {"messages": "o", "system": "s"}, "tags": ROLE_TAGS}),
    ("sft", {"formatting": "sharegpt", "columns": {"messages": "odd"}}),
    ("sft", {"formatting": "sharegpt", "columns": {"messages": "wrong"}}),
    ("dpo", {"ranking": True, "columns": {"prompt": "q", "query": "i", "chosen": "good", "rejected": "bad", "history": "h"}}),
    ("dpo", {"ranking": True, "formatting": "sharegpt", "columns": {"messages": "odd", "chosen": "better", "rejected": "worse"}}),
    ("dpo", {"ranking": True, "formatting": "sharegpt", "columns": {"messages": "c", "chosen": "better", "rejected": "worse"}}),
    ("kto", {"columns": {"prompt": "q", "response": "a", "kto_tag": "tag"}}),
    ("kto", {"formatting": "sharegpt", "columns": {"messages": "c", "kto_tag": "tag"}})]


def records():
    """What its converters read of one record."""
    from llamafactory.data.converter import AlpacaDatasetConverter, SharegptDatasetConverter
    from llamafactory.data.parser import DatasetAttr
    for stage, info in INFOS:
        attributes = DatasetAttr("file", "d")
        attributes.join(info)
        converter = SharegptDatasetConverter if info.get("formatting") else AlpacaDatasetConverter
        made = converter(attributes, None)(SAID)
        yield {"stage": stage, "info": info, "prompt": made["_prompt"], "response": made["_response"], "system": made["_system"]}


def cases(name, tokenizer, which):
    from llamafactory.data.processor.pairwise import PairwiseDatasetProcessor
    from llamafactory.data.processor.pretrain import PretrainDatasetProcessor
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams.data_args import DataArguments

    for key, (system, said) in TEXTS.items():
        for most, last, everything in ((4096, False, False), (37, False, False), (37, True, False), (61, False, True)):
            arguments = DataArguments(template=name, cutoff_len=most, mask_history=last, train_on_prompt=everything)
            template = get_template_and_fix_tokenizer(tokenizer, arguments)
            sft = SupervisedDatasetProcessor(template, tokenizer, None, arguments)
            prompt = conversation(system, said)[:-1]
            ids, labels = sft._encode_data_example(prompt, said_as(prompt, said), system, "", [], [], [])
            yield {"stage": "sft", "template": name, "tokenizer": which, "system": system, "said": said, "cutoff_len": most,
                   "mask_history": last, "train_on_prompt": everything, "ids": ids, "learnt": learnt(labels)}
        for most in (4096, 53):
            arguments = DataArguments(template=name, cutoff_len=most)
            pairs = PairwiseDatasetProcessor(template, tokenizer, None, arguments)
            sides = [{"role": "assistant", "content": text} for text in (said[-1], "worse, and longer than that")]
            chosen, good, rejected, bad = pairs._encode_data_example(prompt, sides, system, "", [], [], [])
            yield {"stage": "dpo", "template": name, "tokenizer": which, "system": system, "said": said, "cutoff_len": most,
                   "rejected": sides[1]["content"], "ids": chosen, "learnt": learnt(good), "rejected_ids": rejected, "rejected_learnt": learnt(bad)}
    for most, packing in ((41, True), (41, False)):
        arguments = DataArguments(template=name, cutoff_len=most)
        arguments.packing = packing
        plain = PretrainDatasetProcessor(template, tokenizer, None, arguments)
        texts = [text for _, said in TEXTS.values() for text in said if text] * 2
        made = plain.preprocess_dataset({"_prompt": [[{"role": "user", "content": text}] for text in texts]})
        yield {"stage": "pt", "template": name, "tokenizer": which, "texts": texts, "cutoff_len": most, "packing": packing,
               "ids": made["input_ids"]}


def written(value):
    """A line for each of a list."""
    def line(one):
        return json.dumps(one, ensure_ascii=False, separators=(",", ":"))
    return "[\n" + ",\n".join(map(line, value)) + "]" if isinstance(value, list) else line(value)


def main():
    bare_packages()
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    golden = {"made_by": f"verify/second/golden/templates.py with LLaMA-Factory {VERSION}; SPDX-License-Identifier: MIT OR Unlicense", "record": SAID, "records": list(records()), "tokenizers": {}, "cases": []}
    for which, tokenizer in tokenizers():
        golden["tokenizers"][which] = json.loads(tokenizer.to_str())
        for name in NAMES:
            fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.to_str()), bos_token="<s>", eos_token="</s>", pad_token="<pad>",
                                           unk_token="<unk>", add_bos_token=which == "marks")
            golden["cases"] += cases(name, fast, which)
    print("{" + ",\n".join(f"{json.dumps(key)}: {written(value)}" for key, value in golden.items()) + "}")


if __name__ == "__main__":
    main()
