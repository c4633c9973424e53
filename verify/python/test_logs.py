# SPDX-License-Identifier: MIT OR Unlicense
"""TensorBoard's own readers over what test_logs.sh has left: test_logs.py FOLDER.

Both of them: the accumulator that programs use, and the one behind the pages of TensorBoard,
which finds runs in folders by itself. Prints "ok .." and "FAIL ..".
"""
import glob
import json
import math
import sys

from tensorboard.backend.event_processing import event_accumulator
from tensorboard.backend.event_processing import plugin_event_multiplexer
from tensorboard.util import tensor_util

folder = sys.argv[1]
NAMES = {"learning_rate": "lr", "accuracy": "acc", "rejected_reward": "reject_reward", "clipfrac": "ppo_clip_ratio"}
failed = False


def verdict(name, wrong):
    global failed
    failed = failed or bool(wrong)
    print(f"FAIL {name}: {wrong}" if wrong else f"ok {name}")


def metrics(run):
    """{tag: [(step, value)]} of a metrics file."""
    tags, step = {}, 0
    for line in open(f"{folder}/{run}.jsonl", encoding="utf-8"):
        row = json.loads(line)
        step = row.get("step", step)
        for name, value in row.items():
            if name in ("step", "rollout", "samples"):
                continue
            phase, name = ("eval", name[5:]) if name.startswith("eval_") else ("train", name)
            value = math.nan if value is None else value
            tags.setdefault(f"{phase}/{NAMES.get(name, name)}", []).append((step, value))
    return tags


def differs(got, want):
    if [step for step, _ in got] != [step for step, _ in want]:
        return f"steps {[step for step, _ in got]}, not {[step for step, _ in want]}"
    for (step, g), (_, w) in zip(got, want):
        if not (math.isclose(g, w, rel_tol=2e-3, abs_tol=2e-3) or (math.isnan(g) and math.isnan(w))):
            return f"step {step} has {g}, not {w}"
    return ""


def compare(run, scalars):
    want = metrics(run)
    if set(scalars) != set(want):
        return f"tags {sorted(set(scalars) ^ set(want))} are in one alone"
    return "; ".join(f"{tag}: {why}" for tag in want if (why := differs(scalars[tag], want[tag])))


def of_programs(run):
    (path,) = glob.glob(f"{folder}/{run}.tb/*")
    reader = event_accumulator.EventAccumulator(path, size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def of_pages(run, plugin):
    reader = plugin_event_multiplexer.EventMultiplexer(tensor_size_guidance={"scalars": 0, "text": 0})
    reader.AddRunsFromDirectory(f"{folder}/{run}.tb")
    reader.Reload()
    (name,) = reader.Runs()
    return {
        tag: [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in reader.Tensors(name, tag)]
        for tag in reader.PluginRunToTagToContent(plugin)[name]
    }


for run in ("dpo", "kto", "rm", "ppo", "world", "whole", "on", "torn", "killed", "texts"):
    verdict(f"logs_tensorboard {run}", compare(run, of_programs(run)))
    pages = {tag: [(step, float(value)) for step, value in all] for tag, all in of_pages(run, "scalars").items()}
    verdict(f"logs_tensorboard_pages {run}", compare(run, pages))

texts = of_pages("texts", "text").get("train/samples", [])
rows = [json.loads(line) for line in open(f"{folder}/texts.jsonl", encoding="utf-8")]
want = [[s["prompt"], s["text"]] for s in rows[0]["samples"]]
got = [[cell.decode() for cell in line[:2]] for line in texts[0][1][1:]] if texts else []
verdict("logs_tensorboard_texts", "" if got == want and len(texts) == len(rows) else f"{got[:1]}, not {want[:1]}")

try:
    import yaml

    (path,) = glob.glob(f"{folder}/whole.wb/*/config.yaml")
    config = {key: item["value"] for key, item in yaml.safe_load(open(path)).items() if key != "wandb_version"}
    right = config["adam_eps"] == 1e-8 and config["max_steps"] == 7 and config["adam_betas"] == [0.9, 0.95]
    verdict("logs_config_is_yaml", "" if right and config["input_template"].endswith("{}\nAssistant: ") else str(config))
except ImportError:
    pass
sys.exit(failed)
