#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# seqpar-verify's line of progress: on a terminal alone, after a second, never wider than the window, and wiped in the end. What is
# said of the dump is the same with it.
cd "$(dirname "$0")/../.." || exit 1
oracle=build/seqpar-verify out=build/test_oracle_bar
rm -rf $out; mkdir -p $out
python=${PYTHON:-python3}
skip() { echo "skip bar: $1"; echo "0 passed, 0 failed, 1 skipped"; exit 0; }
$python -c 'import pty, termios' 2>/dev/null || skip "no $python, or one without pty"
why=$($python -c 'import pty; pty.openpty()' 2>&1) || skip "no terminals here: $(echo "$why" | tail -n 1)"
cat >$out/bar.py <<'END'
import fcntl, os, pty, re, struct, subprocess, sys, termios, threading, time

ORACLE, OUT = sys.argv[1:]
LINE = re.compile(r"^(?:\[[#.]+\]  )?(.+)  (\d+)/(\d+)  (\d+) %  \d+:\d\d (left|so far)$")
failed = 0


def say(name, wrong):
    global failed
    failed += bool(wrong)
    print(f"FAIL {name}: {wrong}" if wrong else f"ok {name}")


def run(*words, columns=None):
    """Exit code, stdout and stderr, which is a terminal of so many columns; None: a pipe."""
    if columns is None:
        done = subprocess.run([ORACLE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return done.returncode, done.stdout.decode(), done.stderr.decode()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen([ORACLE, *words], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    text = []

    def read():
        try:
            while data := os.read(ours, 4096):
                text.append(data)
        except OSError:  # the other end is closed
            pass
    reader = threading.Thread(target=read)
    reader.start()
    stdout = process.stdout.read().decode()
    code = process.wait()
    reader.join()
    os.close(ours)
    return code, stdout, b"".join(text).decode()


def drawn(stderr):
    return [line[:-len("\x1b[K")] for line in stderr.split("\r")[1:] if line.endswith("\x1b[K")]


def judge(stderr, columns, stages):
    """What is wrong with what was drawn; the last is the wiping."""
    lines = drawn(stderr)
    shown = [line for line in lines if line]
    if not shown:
        return f"nothing is drawn: {stderr!r}"
    if not stderr.endswith("\r\x1b[K") or not stderr.startswith("\r"):
        return f"it is not wiped: {stderr[-80:]!r}"
    if max(map(len, shown)) >= columns:
        return f"a line has {max(map(len, shown))} of {columns} columns"
    if columns < 60:
        return None
    odd = [line for line in shown if not (m := LINE.match(line)) or int(m[2]) > int(m[3]) or m[1] not in stages
           or int(m[4]) != 100 * int(m[2]) // int(m[3])]
    return f"drawn was {odd[0]!r}" if odd else None


sizes = ["--sp", "4", "--tokens", "900", "--dp", "2"]
began = time.monotonic()
code, _, stderr = run("gen", "--out", f"{OUT}/case", "--mistake", "hop_lost", *sizes)
say("bar_gen_pipe", code or stderr)
quiet = run("ver", f"{OUT}/case/got")
say("bar_pipe", quiet[0] != 1 or quiet[2])
for columns in 100, 20:
    said = run("ver", f"{OUT}/case/got", columns=columns)
    say(f"bar_of_{columns}_columns", judge(said[2], columns, {"rows"}) or said[:2] != quiet[:2] and "it says something else")
said = run("ver", f"{OUT}/case/got", "--json", columns=80)
say("bar_json", judge(said[2], 80, {"rows"}) or not said[1].startswith("{") and "no JSON")
said = run("ver", f"{OUT}/case/got", "--model", f"{OUT}/case/model", "--budget", "3", columns=100)
stages = {"rows", "the model in fp64", "the model in fp64, and its rounding", "mistakes in log-probs", "mistakes in gradients"}
lines = [LINE.match(line) for line in drawn(said[2]) if LINE.match(line)]
seen, done = {line[1] for line in lines}, [int(line[2]) for line in lines]
say("bar_stages", judge(said[2], 100, stages) or len(seen) < 2 and f"only {seen}")
say("bar_moves", len(set(done)) < 3 and f"of all work {set(done)} was done")
os.rename(f"{OUT}/case/got/rank3.safetensors", f"{OUT}/case/rank3")
say("bar_error", run("ver", f"{OUT}/case/got", columns=80)[2] != f"error: {OUT}/case/got: no file of rank 3 of 8\r\n")
say("bar_short_work", run("gen", "--out", f"{OUT}/small", "--tokens", "9", "--docs", "2", "--sp", "2", columns=80)[2] or run("ver", f"{OUT}/small/got", columns=80)[2])
print(f"# {time.monotonic() - began:.0f} seconds")
sys.exit(failed)
END
OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} $python $out/bar.py $oracle $out >$out/said 2>&1
cat $out/said
passed=$(grep -c '^ok ' $out/said) failed=$(grep -c '^FAIL ' $out/said)
[ "$((passed + failed))" -eq 9 ] || { echo "FAIL bar: $(tail -n 1 $out/said)"; failed=$((failed + 1)); }
rm -rf $out/case $out/small
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
