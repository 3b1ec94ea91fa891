"""Plans held against emulated runs of the same recorded case, and against those of other settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = ROOT / "tests/truth/cases.jsonl"
# What of a peak may be left unexplained.
UNEXPLAINED_AT_MOST = 0.01

# Cases, and the settings of their plans.
PLANS = {
    "o-gpt2-acbf16": "--batch 4 --seq 1024 --autocast bf16",
    "o-qwen2.5-0.5b-acbf16-ckpt": "--batch 8 --seq 1024 --autocast bf16 --checkpoint full --accumulate 2 --sdpa-kernel flash",
    "o-lora64-qwen3-0.6b-all-ckpt": "--batch 4 --seq 1024 --dtype bf16 --checkpoint full --optimizer-impl fused "
    "--lora-rank 64 --lora-dropout 0.05 --lora-targets all-linear",
}

# Plans with a wrong setting, and the setting that the run had.
WRONG = [
    ("o-gpt2-acbf16", "--attention eager", "--attention sdpa", "other_implementation"),
    ("o-gpt2-acbf16", "--batch 6", "--batch 4", "other_setting"),
    ("o-gpt2-acbf16", "--torch 2.6", "--torch 2.15", "other_version"),
    ("o-qwen2.5-0.5b-acbf16-ckpt", "--checkpoint none", "--checkpoint full", "other_setting"),
    ("o-lora64-qwen3-0.6b-all-ckpt", "--dtype fp32", "--dtype bf16", "other_setting"),
]


def changed(settings, wrong):
    """`settings` with the one in `wrong` in place of its own."""
    flag, value = wrong.split()
    words = settings.split()
    if flag in words:
        words[words.index(flag) + 1] = value
        return words
    return [*words, flag, value]


def check(vramledger, folder):
    """Yields what does not hold, a sentence each."""
    cases = {case["id"]: case for case in map(json.loads, CASES.read_text().splitlines())}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def run(*words):
        return subprocess.run([vramledger, *words], cwd=folder, env=environment, capture_output=True, text=True)

    def reconciled(case, words):
        ended = run("plan", f"{case}.config.json", *words, "--format", "json", "-o", "plan.json")
        if ended.returncode not in (0, 1):
            return None, ended.stderr.strip()
        ended = run("reconcile", "plan.json", f"{case}.json", "--format", "json")
        if ended.returncode not in (0, 1):
            return None, ended.stderr.strip()
        return json.loads(ended.stdout), None

    for case, settings in PLANS.items():
        (Path(folder) / f"{case}.config.json").write_text(json.dumps(cases[case]["model"]["config"]))
        script = [sys.executable, str(ROOT / "scripts/truth_case.py"), str(CASES), case, "-o", "truth.json"]
        ended = run("emulate", "--steps", "3", "--format", "json", "-o", f"{case}.json", "--", *script)
        if ended.returncode != 0:
            yield f"{case}: the exit code is {ended.returncode}: {ended.stderr.strip().splitlines()[-1:]}"
            continue
        answer, error = reconciled(case, settings.split())
        if error:
            yield f"{case}: {error}"
            continue
        open_bytes, found = answer["evidence"]["unexplained_bytes"], answer["found"]["allocated_bytes"]
        if open_bytes > found * UNEXPLAINED_AT_MOST or answer["evidence"]["setting"]:
            yield f"{case}: {open_bytes} of {found} bytes are unexplained, and {answer['evidence']['setting']}"
        for of, wrong, want, reason in WRONG:
            if of != case:
                continue
            answer, error = reconciled(case, changed(settings, wrong))
            named = error or (answer["evidence"]["setting"] or {}).get("setting")
            if named != want:
                yield f"{case} with {wrong}: {named} is named, not {want}"
            elif not any(line["reason"] == reason for line in answer["evidence"]["by_reason"]):
                yield f"{case} with {wrong}: {reason} is no reason of {answer['evidence']['by_reason']}"
