"""How much of a batch's gradient is signal, by the baseline c, before the first update.

python tests/gradient_signal.py --policy START --trajectories FILE

At the start TOPR's gradient for A = R - c is (1 - c) P - (1 + c) N, where P and N sum
grad log pi / T over the positives and the negatives of a batch: c = -1 is positives only, c = 0
canonical TOPR. Signal: the squared norm of the mean gradient, from two disjoint halves of the
batches, without bias; it is divided by the mean squared norm of a batch's gradient. All linear
weights behind the MLPs' activations stand for the model.
"""

import argparse

import numpy as np
import torch

from topr.batching import pack
from topr.losses.base import sum_tokens
from topr.policy import load_policy
from topr.trajectories import read_trajectories

GROUPS = 4  # of a batch


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--trajectories", required=True, help="a file with whole groups")
    parser.add_argument("--batches", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    policy = load_policy(args.policy)
    policy.requires_grad_(False)
    weights = [w for name, w in policy.named_parameters() if "down_proj" in name]
    for weight in weights:
        weight.requires_grad_(True)

    groups: dict[str, list] = {}
    for row in read_trajectories(args.trajectories):
        groups.setdefault(row.group, []).append(row)
    order = np.random.default_rng(0).permutation(len(groups))[: GROUPS * args.batches]
    chosen = [list(groups.values())[i] for i in order]
    halves = torch.zeros(2, 2, sum(w.numel() for w in weights))  # half, sign
    products = torch.zeros(2, 2, dtype=torch.float64)  # mean of the products of P and N
    for number in range(args.batches):
        rows = sum(chosen[GROUPS * number : GROUPS * (number + 1)], [])
        found = [gradient(policy, weights, rows, sign) for sign in (1, -1)]
        pair = torch.stack(found)
        products += (pair @ pair.T).double() / args.batches
        halves[number % 2] += pair / (args.batches // 2)
        if number + 1 in (args.batches // 2, args.batches):
            report(halves * args.batches / (number + 1), products * args.batches / (number + 1))


def gradient(policy, weights, rows, sign) -> torch.Tensor:
    """That of the sum of log pi / T over the rows with rewards of this sign, per row of all."""
    chosen = [row for row in rows if row.reward * sign > 0]
    if not chosen:
        return torch.zeros(sum(weight.numel() for weight in weights))
    tokens = pack(
        [np.array(row.prompt_ids) for row in chosen], [np.array(row.response_ids) for row in chosen]
    )
    with torch.autocast("cpu", torch.bfloat16):
        log_probs_N = policy.log_probs(tokens)
    mean_B = sum_tokens(log_probs_N, tokens.length_B) / tokens.length_B
    parts = torch.autograd.grad(mean_B.sum() / len(rows), weights)
    return torch.cat([part.flatten() for part in parts])


def report(halves: torch.Tensor, products: torch.Tensor):
    print("\nc      signal / gradient   cosine of the mean gradient with that of c = 0")
    mean = halves.mean(0)
    reference = (mean[0] - mean[1]).double()  # in float32 a cosine exceeds 1
    for c in (-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5):
        factors = torch.tensor([1.0 - c, -1.0 - c])
        first, second = (torch.einsum("s,sn->n", factors, half) for half in halves)
        signal = float(first @ second)
        total = float(factors.double() @ products @ factors.double())
        cosine = torch.cosine_similarity(((first + second) / 2).double(), reference, dim=0)
        print(f"{c:5}  {signal / total:17.4f}   {float(cosine):.3f}", flush=True)


if __name__ == "__main__":
    main()
