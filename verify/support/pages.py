# SPDX-License-Identifier: MIT OR Unlicense
"""pages.py FOLDER - runs the commands of verify/pages/commands.tsv as they are printed, with stand-ins for what they name.

stand_ins.py makes models and data sets in FOLDER/made. Batch sizes, lengths and numbers of records are divided by FACTOR (and are at
least 1), since the stand-ins are small. Each command is run to its end, then once more with other rank options: both runs leave the
same bytes of weights and the same losses and gradient norms, and DPO begins with ln 2, to the bit. With TEST_PAGE=1 the table of verify/pages/COMMANDS.md is written; else it is compared."""
import json
import math
import os
import re
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FACTOR, LIMIT = 16, 240
SCALED = {"train_batch_size", "micro_train_batch_size", "rollout_batch_size", "micro_rollout_batch_size", "max_len", "prompt_max_len",
          "generate_max_len", "cutoff_len", "sequence_len", "max_samples", "per_device_train_batch_size", "micro_batch_size"}
RANKS = ("ring_attn_size", "ring_head_stride", "sequence_parallel_size")  # of one model
ROLES = re.compile("--((ref|reward|critic|actor)_num_(nodes|gpus_per_node)|vllm_num_engines|vllm_tensor_parallel_size)$")
MORE = {"omp_threads": "1", "metrics_path": "metrics"}
IN_YAML = re.compile(r"^(sequence_parallel_size|sequence_parallel_degree|heads_k_stride|ring_attn_func): *.*\n", re.M)
MODELS = {"meta-llama/Meta-Llama-3-8B": "llama3", "OpenRLHF/Llama-3-8b-sft-mixture": "llama3", "meta-llama/Llama-2-70b-chat-hf": "llama",
          "OpenLLMAI/Llama-2-7b-sft-model-ocra-500k": "llama", "meta-llama/Llama-2-7b-hf": "llama",
          "mistralai/Mixtral-8x7B-v0.1": "mixtral", "meta-llama/Llama-3-8B-Instruct": "llama3"}
SETS = ("Open-Orca/OpenOrca", "OpenRLHF/preference_dataset_mixture2_and_safe_pku", "OpenRLHF/prompt-collection-v0.1",
        "Dahoas/full-hh-rlhf", "tasksource/oasst1_pairwise_rlhf_reward", "Anthropic/hh-rlhf", "lmsys/chatbot_arena_conversations",
        "openai/webgpt_comparisons")


def split(command):
    """Words, as the shell makes them of a line."""
    said = subprocess.run(["bash", "-c", "printf '%s\\0' " + command], capture_output=True, check=True).stdout
    return said.decode().split("\0")[:-1]


def after(words, option, change):
    """The value of an option, changed."""
    return [change(word) if i and words[i - 1] == option else word for i, word in enumerate(words)]


def scaled(words):
    for word in {word for word in words if word.startswith("--") and word[2:] in SCALED}:
        words = after(words, word, lambda value: str(max(1, int(value) // FACTOR)))
    return after(words, "--save_path", lambda path: os.path.join("out", os.path.basename(path)))


def without(words, names):
    drop = {i for i, word in enumerate(words) if word[2:] in names and word.startswith("--")}
    return [word for i, word in enumerate(words) if i not in drop and i - 1 not in drop]


def elsewhere(words):
    """The same command with other rank options."""
    if any(word.endswith(".yaml") for word in words):
        return [word.replace(".yaml", ".alone.yaml") for word in words]
    if any(word.startswith("--hostfile") for word in words):  # one rank in the place of two replicas, which takes twice the micro-batches
        words = [word for word in without(words, RANKS) if not word.startswith("--hostfile")]
        words = after(words, "--gradient_accumulation_steps", lambda value: str(2 * int(value)))
        return ["deepspeed", "--num_gpus", "1", *words[1:]]
    if any(word[2:] in RANKS for word in words):
        return without(words, RANKS)
    if any(map(ROLES.match, words)):
        return ["1" if i and ROLES.match(words[i - 1]) else word for i, word in enumerate(words)]
    return [*words, "--ring_attn_size", "3"]


def reward(folder, row, name):
    return f"{folder}/{row}/0/out/{name}"


def names(folder):
    """The file that says where the stand-ins are. The reward model is what the page's own train_rm leaves."""
    with open(os.path.join(folder, "names.tsv"), "w") as file:
        for name, kind in MODELS.items():
            file.write(f"{name}\t{folder}/made/{kind}\n")
        for name in SETS:
            file.write(f"{name}\t{folder}/made/{name.split('/')[1]}.jsonl\n")
        file.write(f"OpenRLHF/Llama-3-8b-rm-mixture\t{reward(folder, 'readme_train_rm', 'llama3-8b-rm')}\n")
    os.makedirs(os.path.join(folder, "made/data"))
    os.link(f"{folder}/made/prompt-collection-v0.1.jsonl", f"{folder}/made/data/train.jsonl")


def write_yaml(folder, place):
    """The pages' files, with smaller sizes, and the same for one rank; and LLaMA-Factory's dataset_info.json."""
    os.makedirs(os.path.join(place, "data"))
    orca = {"file_name": f"{folder}/made/OpenOrca.jsonl",
            "columns": {"prompt": "question", "response": "response", "system": "system_prompt"}}
    with open(os.path.join(place, "data/dataset_info.json"), "w") as file:
        json.dump({"orca": orca}, file)
    for name in ("360", "axolotl"):
        with open(os.path.join(ROOT, f"verify/pages/{name}.yaml")) as file:
            text = re.sub(r"^(\w+): (\d+)$", lambda m: f"{m[1]}: {max(1, int(m[2]) // FACTOR)}" if m[1] in SCALED else m[0], file.read(),
                          flags=re.M)
        for ending, said in (("yaml", text), ("alone.yaml", IN_YAML.sub("", text))):
            with open(os.path.join(place, f"{name}.{ending}"), "w") as file:
                file.write(said)
    with open(os.path.join(place, "8nodes.host"), "w") as file:
        file.writelines(f"node{i} slots=1\n" for i in range(1, 9))


def more(words):
    """Our own words, in the form of the program whose command it is."""
    if words[0] == "llamafactory-cli":
        return [f"{key}={value}" for key, value in MORE.items()]
    return [word for key, value in MORE.items() for word in (f"--{key}", value)]


class Run:
    """A command's end: exit code, what it said, what it left."""

    def __init__(self, folder, place, words):
        os.makedirs(place)
        write_yaml(folder, place)
        begin = time.monotonic()
        program = [os.path.join(ROOT, "build/seqpar"), "--local_names", os.path.join(folder, "names.tsv"),
                   "--cache_dir", os.path.join(folder, "cache")]
        done = subprocess.run([os.path.join(ROOT, "ci/limit.sh"), str(LIMIT), *program, *words, *more(words)],
                              cwd=place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.seconds, self.code, self.said, self.place = time.monotonic() - begin, done.returncode, done.stdout, place
        with open(os.path.join(place, "said"), "w") as file:
            file.write(done.stdout)

    def last_line(self):
        return (self.said.strip().splitlines() or ["nothing"])[-1]

    def weights(self):
        out = os.path.join(self.place, "out")
        found = [os.path.join(at, name) for at, _, files in os.walk(out) for name in files if name in ("model.safetensors", "adapter_model.safetensors")]
        return [open(path, "rb").read() for path in sorted(found)]

    def world(self):
        found = re.search(r"^ranks: (\d+) data-parallel x (\d+) sequence-parallel", self.said, re.M)
        return f"{found[1]} x {found[2]}" if found else "?"

    def steps(self):
        """What the metrics say of each step, without times and memory."""
        lines = [json.loads(line) for line in open(os.path.join(self.place, "metrics"))]
        return [{key: value for key, value in line.items() if not re.search("second|peak_bytes", key)} for line in lines]


def of_dpo(words):
    return "train_dpo" in " ".join(words)


def judged(words, runs):
    """What is wrong with both runs; nothing if all is as it must be."""
    for run in runs:
        if run.code:
            return f"exit code {run.code}: {run.last_line()[:300]}"
        if not run.weights():
            return "no weights were left"
    first, other = runs
    if first.world() == other.world():
        return f"both runs have {first.world()} ranks"
    if first.weights() != other.weights():
        return f"{first.world()} and {other.world()} ranks leave other weights"
    if first.steps() != other.steps():
        return f"{first.world()} and {other.world()} ranks report other numbers"
    begin = first.steps()[0]
    if not all(math.isfinite(value) for value in begin.values() if isinstance(value, float)):
        return "a figure of the first step is not finite"
    if of_dpo(words) and begin["loss"] != math.log(2):
        return f"the first loss is {begin['loss']!r}, not ln 2"
    return None


def changed(words, more):
    """A command with words behind it: values of options that it has take the place of theirs; a value of - removes the option."""
    i = 0
    while i < len(more):
        valued = i + 1 < len(more) and not more[i + 1].startswith("--")
        words = without(words, [more[i][2:]]) if more[i] in words else words
        if not valued or more[i + 1] != "-":
            words = words + more[i:i + 1 + valued]
        i += 1 + valued
    return words


class Row:
    """A line of commands.tsv."""

    def __init__(self, line, known, folder):
        self.name, self.page, self.wants, self.note, command = line.rstrip("\n").split("\t")
        for key, path in (("{article_rm}", reward(folder, "article_train_rm", "7b_llama")), ("{data}", f"{folder}/made/data"),
                          ("{board}", "board")):
            command = command.replace(key, path)
        base, _, more = command.partition(" ")
        self.words = changed(known[base[1:]].words, split(more)) if base.startswith("@") else split(command)
        known[self.name] = self

    def worlds(self):
        words = scaled(self.words)
        return [words] if self.wants.startswith("refused") else [words, elsewhere(words)]

    def judge(self, runs):
        if self.wants == "equal":
            return judged(self.words, runs)
        said = runs[0].last_line()
        if not runs[0].code or runs[0].weights():
            return "was not refused"
        return None if re.search(self.wants.split(" ", 1)[1], said) else f"is refused by: {said[:300]}"


def read_rows(folder):
    known = {}
    with open(os.path.join(ROOT, "verify/pages/commands.tsv")) as file:
        return [Row(line, known, folder) for line in file if not line.startswith("#")]


ABOUT = f"""# The pages' commands

<!-- SPDX-License-Identifier: MIT OR Unlicense -->

Every command of the OpenRLHF sequence-parallel page, README and article, of 360-LLaMA-Factory's README and of axolotl's page, as it is
printed ([commands.tsv](commands.tsv)), was run by `seqpar` to its end. Made by `make check SUITES=pages TEST_PAGE=1`, on small models
and data sets of the form that the page names ([stand_ins.py](../support/stand_ins.py)): batch sizes, lengths and numbers of records are
divided by {FACTOR}. Then it was run with other rank options. *Equal* means: both runs leave the same bytes of weights, and report the
same losses and gradient norms; the first loss of DPO is ln 2, to the bit. A world is data-parallel x sequence-parallel ranks, of PPO
those of the actor.

"""
REMARKS = """
What the pages leave open:

- axolotl's page contradicts itself: its example has `sequence_parallel_degree: 4`, and its text says of it that a sequence is split
  into "2 subsequences" across 2 GPUs. The degree counts here: 4 ranks.
- 360-LLaMA-Factory's README names 8 GPUs for 72B in its text and 32 in its table; its command starts what the hostfile holds.
- `--remote_rm_url`, which the README names, asks a server: the suite reward runs it.
- The article's reward models mix four sets without naming keys. They are read as OpenRLHF 0.2 read them, by their form; a tie of
  chatbot_arena_conversations or webgpt_comparisons is left out, where 0.2 took the second answer for the better one.
"""


def table(rows):
    """What stands in COMMANDS.md: rows of (row, runs)."""
    lines = ["| command | page | world | other world | result | seconds |", "|---|---|---|---|---|---|"]
    for row, runs in rows:
        result = "refused" if row.wants != "equal" else "equal, begins with ln 2" if of_dpo(row.words) else "equal"
        worlds = [run.world() for run in runs] if row.wants == "equal" else ["", ""]
        seconds = ", ".join(f"{run.seconds:.1f}" for run in runs)
        lines.append("| " + " | ".join((row.name, row.page, *worlds, result, seconds)) + " |")
    notes = [f"- {row.name}: {row.note}." for row, _ in rows if row.note != "-"]
    return ABOUT + "\n".join(lines) + "\n\n" + "\n".join(notes) + "\n" + REMARKS


def untimed(text):
    return re.sub(r"\| [\d., ]+ \|$", "|", text, flags=re.M)


def compared(rows, path):
    """Is the committed table the one of these runs, but for seconds?"""
    text = table(rows)
    if os.environ.get("TEST_PAGE"):
        with open(path, "w") as file:
            file.write(text)
    with open(path) as file:
        return untimed(file.read()) == untimed(text)


def said(name, wrong):
    print(f"FAIL pages_{name}: {wrong}" if wrong else f"ok pages_{name}", flush=True)


def main():
    folder = os.path.abspath(sys.argv[1])
    names(folder)
    rows, found = [], []
    for row in read_rows(folder):
        runs = [Run(folder, os.path.join(folder, row.name, str(i)), words) for i, words in enumerate(row.worlds())]
        rows.append((row, runs))
        found.append((row.name, row.judge(runs)))
        said(*found[-1])
    wrong = None if compared(rows, os.path.join(ROOT, "verify/pages/COMMANDS.md")) else \
        "verify/pages/COMMANDS.md is not what these runs make; make check SUITES=pages TEST_PAGE=1 writes it"
    found.append(("table", wrong))
    said(*found[-1])
    failed = sum(why is not None for _, why in found)
    print(f"{len(found) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


main()
