# SPDX-License-Identifier: MIT OR Unlicense
"""The door to the binary seqpar-verify; computes nothing itself.

    import seqpar_verify
    seqpar_verify.expect_right("dump", want="dump_of_one_rank")     # raises AssertionError with the diagnosis
    seqpar_verify.expect_right("dump", model="dump/model", require=["gradients", "norm"])
    seqpar_verify.ver("dump")["mistakes"]                           # what --json says

The dump is written by one of these modules, which come with this one; help() of each says how:

    seqpar_trainer      a step of transformers' Trainer or of TRL's trainers
    seqpar_record       a step of a plain torch loop; one module's or function's attention
    seqpar_dump         by hand, from numpy or torch arrays

seqpar_reference computes right values for a test of your own: positions, splits, attention, losses, AdamW.

What is right without a word of its gradients is a warning, GradientsNotJudged; with strict=True or require="gradients" it is no pass.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import warnings

VERDICTS = {0: "right", 1: "wrong", 4: "insufficient", 5: "marginal"}


class GradientsNotJudged(UserWarning):
    """A step passed, and nothing was said of its gradients."""


def binary():
    """Path of seqpar-verify: that of the environment, of this package, or of PATH."""
    inside = pathlib.Path(__file__).parent / "seqpar-verify"
    found = os.environ.get("SEQPAR_VERIFY") or (str(inside) if inside.exists() else shutil.which("seqpar-verify"))
    if not found:
        raise FileNotFoundError("seqpar-verify is not built; type: pip install ./verify/python, or set SEQPAR_VERIFY to its path")
    return found


def _word(value):
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return os.fspath(value) if hasattr(value, "__fspath__") else str(value)


def _run(dump, options, as_json):
    words = [binary(), "ver", os.fspath(dump)] + ["--json"] * as_json
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name}"] + ([] if value is True else [_word(value)])
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ver(dump, **options):
    """The verdict on a dump as a dict: verdict, summary, judged, not_judged, not_excluded, mistakes, stages. Options as on the
    command line: want, model, tolerance, require (a list of stages), strict, complete."""
    said = _run(dump, options, True)
    if said.returncode not in VERDICTS:
        raise ValueError(said.stderr.strip())
    return json.loads(said.stdout)


def expect_right(dump, **options):
    """The headline, which says what was judged, or an AssertionError whose text is the diagnosis. Evidence that shows nothing is no
    pass; one without gradients is a warning."""
    said = _run(dump, options, False)
    if said.returncode not in VERDICTS:
        raise ValueError(said.stderr.strip())
    if said.returncode or said.stdout.startswith("marginal") and options.get("strict"):
        raise AssertionError(f"seqpar-verify ver {dump}\n{said.stdout}")
    headline = " ".join(re.split(r"\n {4}(?=\S)", said.stdout)[0].split())  # what is wrapped is indented by more
    if "gradients of parameters were NOT judged" in headline:
        warnings.warn(f"{dump}: {headline}", GradientsNotJudged, stacklevel=2)
    return headline


def main():
    found = binary()
    if os.path.realpath(found) == os.path.realpath(sys.argv[0]):  # it would start itself for ever
        raise SystemExit(f"error: {found} is this command itself, not the binary that it starts; set SEQPAR_VERIFY to that one's path, or unset it")
    os.execv(found, ["seqpar-verify", *sys.argv[1:]])
