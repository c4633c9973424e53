# SPDX-License-Identifier: MIT OR Unlicense
"""The door to the binary seqpar-verify; computes nothing itself.

    import seqpar_verify
    seqpar_verify.expect_right("dump", want="dump_of_one_rank")     # raises AssertionError with the diagnosis
    seqpar_verify.ver("dump")["mistakes"]                           # what --json says
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys

VERDICTS = {0: "right", 1: "wrong", 4: "insufficient", 5: "marginal"}


def binary():
    """Path of seqpar-verify: that of the environment, of this package, or of PATH."""
    inside = pathlib.Path(__file__).parent / "seqpar-verify"
    found = os.environ.get("SEQPAR_VERIFY") or (str(inside) if inside.exists() else shutil.which("seqpar-verify"))
    if not found:
        raise FileNotFoundError("seqpar-verify is not built; type: pip install ./verify/python, or set SEQPAR_VERIFY to its path")
    return found


def _run(dump, options, as_json):
    words = [binary(), "ver", os.fspath(dump)] + ["--json"] * as_json
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name}"] + ([] if value is True else [os.fspath(value) if hasattr(value, "__fspath__") else str(value)])
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ver(dump, **options):
    """The verdict on a dump as a dict: verdict, mistakes, stages. Options as on the command line: want, model, tolerance."""
    said = _run(dump, options, True)
    if said.returncode not in VERDICTS:
        raise ValueError(said.stderr.strip())
    return json.loads(said.stdout)


def expect_right(dump, **options):
    """Nothing, or an AssertionError whose text is the diagnosis. Evidence that shows nothing is no pass."""
    said = _run(dump, options, False)
    if said.returncode not in VERDICTS:
        raise ValueError(said.stderr.strip())
    if said.returncode or said.stdout.startswith("marginal") and options.get("strict"):
        raise AssertionError(f"seqpar-verify ver {dump}\n{said.stdout}")


def main():
    os.execv(binary(), ["seqpar-verify", *sys.argv[1:]])
