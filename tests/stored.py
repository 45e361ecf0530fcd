"""Train on log mu as a server in bfloat16 reported it, and as this project computes it again.

python tests/stored.py --python V/bin/python   # an environment with vLLM, see vllm.py

The embedded task, 8,000 responses of one server. Prints what `import` says of the difference, then
pass@1 before and after training, by seed.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from vllm import ROOT, Server, make_wide, run

from topr.policy import load_policy
from topr.sampling import Sampling, ServerSampler
from topr.tasks import Arithmetic

SAMPLES = 16


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="of the environment that has vLLM")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    name = make_wide(work / "policy", 0, steps=1150)
    policy = load_policy(str(name))
    task = Arithmetic()
    problems = task.problems(str(ROOT / "data/arithmetic/train.jsonl"))
    prompts = [policy.tokenizer.encode(task.prompt(p, policy.tokenizer)) for p in problems]
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=40)
    with Server(args.python, name, 8161, "--dtype", "bfloat16", "--max-model-len", "96") as server:
        sampled = ServerSampler(server.url).sample(policy, prompts, SAMPLES, sampling, 0)
    lines = []
    for problem, prompt, responses in zip(problems, prompts, sampled, strict=True):
        for ids, finished, log_probs in responses:
            text = policy.tokenizer.decode(ids[:-1] if finished else ids)
            row = {"prompt_ids": prompt, "response_ids": ids, "logprobs": log_probs}
            row["reward"] = task.grade(text, problem.gold).reward if finished else -1.0
            lines.append(json.dumps(row) + "\n")
    (work / "rows.jsonl").write_text("".join(lines))
    for log_mu in ("rescored", "stored"):
        data = work / f"{log_mu}.parquet"
        command = ["import", work / "rows.jsonl", "--policy", name, "--log_mu", log_mu]
        print(run("-m", "topr.trajectories", *command, "--out", data))
        for seed in range(args.seeds):
            logger = "--trainer.logger.init_args."
            fit = ["fit", "--config", "configs/arithmetic.yaml", "--model.policy", name]
            fit += ["--data.train", data, "--data.val", "null", "--seed_everything", seed]
            fit += ["--trainer.val_check_interval", "1.0", "--trainer.enable_progress_bar", "false"]
            run("train.py", *fit, f"{logger}save_dir={work}", f"{logger}name={log_mu}")
            summary = json.loads((work / log_mu / f"version_{seed}/summary.json").read_text())
            figures = {when: summary[when]["pass@1"] for when in ("before", "after")}
            start = summary["max_abs_log_ratio_at_start"]
            print(f"{log_mu}, seed {seed}: {figures}, largest |h| at the start {start:.2g}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
