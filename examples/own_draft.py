"""A draft of one's own: distilled from the target alone, on the target's own text. About seven minutes on two cores.

python examples/own_draft.py my-draft                                       # a folder for the draft
python examples/own_draft.py my-draft --seconds-writing 600 --seconds-training 1800      # better, but longer
"""

import subprocess
import sys
from pathlib import Path

from specbranch import LLM, SamplingParams

TARGET = "smollm2-135m"

folder, *options = sys.argv[1:] or ["my-draft"]
if not Path(folder, "config.json").exists():
    command = ["distill", "--target", TARGET, "--layers", "2", "--head-tokens", "8192", "--out", folder, *options]
    subprocess.run([sys.executable, "-m", "specbranch", *command], check=True)

with LLM(TARGET, draft=folder, warm_up="lazy") as llm:
    talk = [{"role": "user", "content": "Name three fruits."}]
    params = SamplingParams(max_tokens=48)
    ours, plain = (llm.using(method).chat(talk, params) for method in ("speculative", "autoregressive"))
    print(ours.text)
    print("The text of plain decoding:", ours.text == plain.text)
    print("Accepted:", ours.stats["accepted"], "of", ours.stats["drafted"], "drafted tokens")
    print(f"Tokens a target forward: {ours.stats['tokens_per_forward']:.2f}")
