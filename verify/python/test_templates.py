# SPDX-License-Identifier: MIT OR Unlicense
"""demos/prepare.py --template and --dataset_info against what LLaMA-Factory itself makes of the same records, which
verify/second/golden/templates.py has written down: tokens and what is learnt, to the last one.

    test_templates.py FOLDER
"""
import collections
import contextlib
import io
import json
import os
import struct
import sys
import traceback

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "demos"))
import prepare  # noqa: E402
from tokens import dataset_info, token_file  # noqa: E402

OUT = sys.argv[1]
KINDS = {"sft": "sft", "dpo": "pairs", "kto": "labelled", "pt": "sft"}


def folder(name, tokenizer):
    path = os.path.join(OUT, name)
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "tokenizer.json"), "w", encoding="utf-8") as file:
        json.dump(tokenizer, file)
    with open(os.path.join(path, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "add_bos_token": name == "marks"}, file)
    return path


def section(data, which):
    count = struct.unpack_from("<I", data, 28)[0]
    for i in range(count):
        name, _, at, size, _ = struct.unpack_from("<IIQQQ", data, token_file.HEADER + token_file.ENTRY * i)
        if name == which:
            return data[at:at + size]
    raise ValueError(f"no section {which}")


def documents(path):
    """ids and what is learnt of each document of a token file."""
    with open(path, "rb") as file:
        data = file.read()
    ends = struct.unpack(f"<{len(section(data, token_file.OFFSETS)) // 8}Q", section(data, token_file.OFFSETS))
    ids = struct.unpack(f"<{ends[-1]}i", section(data, token_file.IDS))
    mask = section(data, token_file.MASK)
    return [(list(ids[a:b]), "".join(map(str, mask[a:b]))) for a, b in zip(ends, ends[1:])]


def made(records, info, model, *more):
    """The documents of these records."""
    data, out = os.path.join(OUT, "d.jsonl"), os.path.join(OUT, "d.tokens")
    with open(data, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    with contextlib.redirect_stdout(io.StringIO()):
        prepare.prepare(["--pretrain", model, "--dataset", data, "--output", out, "--overwrite", "--workers", "1", "--truncation",
                         "cut_both", "--dataset_info", json.dumps([info]), *more])
    return documents(out)


def conversation(case):
    """The record that the golden case stands for, in the form that has a system's text and several turns."""
    turns = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(case["said"])]
    record = {"conversations": turns, "system": case["system"]}
    if case["stage"] == "dpo":
        record.update(conversations=turns[:-1], chosen=turns[-1], rejected={"from": "gpt", "value": case["rejected"]})
    return record


SHARED = {"formatting": "sharegpt", "columns": {"messages": "conversations", "system": "system", "chosen": "chosen",
                                                "rejected": "rejected"}}


def without_first(learnt):
    """Nothing stands before the first token to predict it."""
    return "0" + learnt[1:]


def rendering(case, model):
    more = ["--template", case["template"], "--kind", KINDS[case["stage"]], "--max_len", str(case["cutoff_len"])]
    more += ["--train_on", "all"] * case.get("train_on_prompt", False) + ["--train_on", "last"] * case.get("mask_history", False)
    found = made([conversation(case)], SHARED, model, *more)
    wanted = [(case["ids"], without_first(case["learnt"]))]
    if case["stage"] == "dpo":
        wanted.append((case["rejected_ids"], without_first(case["rejected_learnt"])))
    assert found == wanted, f"{found} instead of {wanted}"


def plain(case, model):
    info = {"columns": {"prompt": "text"}, "blocks": case["packing"]}
    found = made([{"text": text} for text in case["texts"]], info, model, "--template", case["template"], "--pretrain_mode",
                 "--max_len", str(case["cutoff_len"]))
    assert [ids for ids, _ in found] == case["ids"], f"{found} instead of {case['ids']}"


def learnt_of(case, model):
    """A record of dataset_info.json as messages."""
    info = dataset_info.Info(case["info"], KINDS[case["stage"]], False)
    try:
        read = info.converted(GOLDEN["record"])
    except dataset_info.Lapsed:
        read = None
    if not case["prompt"] or not case["response"]:
        assert read is None, f"{read} of a record that is left out"
        return
    system = [{"role": "system", "content": case["system"]}] * bool(case["system"])
    if case["stage"] == "dpo":
        wanted = [system + case["prompt"] + [side] for side in case["response"]]
        assert [read["chosen"], read["rejected"]] == wanted, read
        return
    said = case["response"][0]
    assert read["messages"] == system + case["prompt"] + [said], read
    assert case["stage"] != "kto" or read["label"] is True, read


with open(os.path.join(ROOT, "verify/second/golden_templates.json"), encoding="utf-8") as golden:
    GOLDEN = json.load(golden)


def main():
    models = {name: folder(name, tokenizer) for name, tokenizer in GOLDEN["tokenizers"].items()}
    groups = collections.defaultdict(list)
    for case in GOLDEN["cases"]:
        groups[f"{case['stage']}_{case['template']}_{case['tokenizer']}"].append(
            (plain if case["stage"] == "pt" else rendering, case, models[case["tokenizer"]]))
    for case in GOLDEN["records"]:
        groups[f"records_{case['stage']}"].append((learnt_of, case, None))
    for name, cases in groups.items():
        try:
            for check, case, model in cases:
                check(case, model)
            print(f"ok templates_{name}: {len(cases)}")
        except Exception as why:
            shown = {key: value for key, value in case.items() if key not in ("ids", "learnt", "rejected_ids", "rejected_learnt")}
            print(f"FAIL templates_{name}: {json.dumps(shown, ensure_ascii=False)[:200]}: {str(why)[:300] or type(why).__name__}")
            traceback.print_exc(file=sys.stderr)


main()
