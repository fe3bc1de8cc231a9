"""Train a small language model by reinforcement learning, and see what its precision does.

    python examples/rl/rl_fp16.py                                  float16 weights, float32 masters
    python examples/rl/rl_fp16.py --precision bf16 --no-masters
    python examples/rl/rl_fp16.py --compare                        all in turn; a table, a picture
    python examples/rl/rl_fp16.py --save rl.pt                     and --resume rl.pt to go on

The policy is sampled a token at a time, with a cache, and trained on whole sequences. These two
round differently, so the log-probabilities that the gradient is computed from are not those that
the answers were drawn by. `train_step` is the whole method; read it first.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import rl_task
import torch
from torch import Tensor, nn

from apex_mp import _C, cast_parameters, load_checkpoint, save_checkpoint
from apex_mp.amp import GradScaler
from apex_mp.monitor import lost_updates
from apex_mp.optimizers import FusedAdam

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for arguments.py and machine.py
from arguments import device, existing, positive
from machine import warn_if_older

try:
    import rl_compare
    from tqdm import tqdm
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    sys.exit(f"{error}; this recipe needs: pip install transformers matplotlib tqdm")

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LOG_EVERY = 20  # steps
LONGEST = 64  # tokens that the policy takes, of prompt and answer
# Flags that decide what a run computes: a checkpoint of a run with others is refused.
SETUP = (
    *("precision", "masters", "prompts", "group", "length", "width", "layers"),
    *("learning_rate", "loss_scale", "seed"),
)


@dataclass
class Step:
    """What is noted of a step.

    A ratio is that of the probabilities of a token, or of an answer, when it is trained on and when
    it was drawn: 1 if nothing were rounded.
    """

    reward: float  # mean of the answers
    mismatch: float  # mean |log ratio| of the tokens
    largest_mismatch: float
    outside: float  # share of tokens whose ratio leaves 1 +- 0.01
    effective: float  # effective sample size of the answers, over their number
    lost: float  # share of the updates of weights that rounding loses
    scale: float
    skipped: bool
    tokens_per_s: float

    def __str__(self) -> str:
        return (
            f"reward {self.reward:.3f}, mismatch {self.mismatch:.1e}, largest "
            f"{self.largest_mismatch:.1e}, outside {100 * self.outside:.1f} %, scale {self.scale:g}"
            f"{', skipped' * self.skipped}"
        )


class Run:
    """A policy, what trains it, and the steps so far."""

    def __init__(self, args: argparse.Namespace, reward: rl_task.Reward = rl_task.reward) -> None:
        self.args, self.reward = args, reward
        torch.manual_seed(args.seed)
        self.policy = build_policy(args)
        self.optimizer = FusedAdam(
            self.policy.parameters(), lr=args.learning_rate, master_weights=args.masters
        )
        self.scaler = GradScaler(
            args.device.type,
            init_scale=args.loss_scale,
            enabled=args.precision == "fp16",
            model=self.policy,
        )
        self.generator = torch.Generator(args.device).manual_seed(args.seed)
        self.steps: list[Step] = []

    def train_step(self) -> Step:
        """Draw a group of answers to each prompt, and make those above the group's mean likelier.

        This is the group-relative policy gradient of arXiv 2402.03300 without its KL term.
        """
        args, start = self.args, time.perf_counter()
        prompts = rl_task.prompts(args.prompts, self.generator).repeat_interleave(args.group, 0)
        answers, drawn = sample(self.policy, prompts, args.length, self.generator)
        rewards = rl_task.checked(self.reward(prompts.tolist(), answers.tolist()), len(answers))
        groups = torch.tensor(rewards, device=args.device).view(args.prompts, args.group)
        advantages = groups - groups.mean(1, keepdim=True)
        advantages /= groups.std(1, keepdim=True) + 0.01

        trained = log_probabilities(self.policy, prompts, answers)
        ratios = (trained - drawn).exp()
        loss = -(ratios * advantages.view(-1, 1)).mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        scale = self.scaler.get_scale()
        counting = time.perf_counter()
        lost = lost_updates(self.optimizer, scale=scale)  # Empty with masters.
        start += time.perf_counter() - counting
        self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

        with torch.no_grad():
            differences = (trained - drawn).abs()
            weights = (trained - drawn).sum(1).exp()
            step = Step(
                reward=groups.mean().item(),
                mismatch=differences.mean().item(),
                largest_mismatch=differences.max().item(),
                outside=((ratios - 1).abs() > 0.01).float().mean().item(),
                effective=(weights.mean() ** 2 / (weights**2).mean()).item(),
                lost=sum(each.lost for each in lost) / max(sum(each.updates for each in lost), 1),
                scale=scale,
                skipped=self.scaler.step_was_skipped(self.optimizer),
                tokens_per_s=answers.numel() / (time.perf_counter() - start),
            )
        self.steps.append(step)
        return step

    def fit(self, bar: tqdm) -> None:
        """Train from where the run is to its end."""
        while len(self.steps) < self.args.steps:
            step = self.train_step()
            bar.set_postfix_str(f"reward {step.reward:.3f}", refresh=False)
            bar.update()
            if len(self.steps) % LOG_EVERY == 0 and not self.args.compare:
                print(f"step {len(self.steps)}: {step}")

    # Saving.

    def setup(self) -> dict[str, str]:
        return {name: str(getattr(self.args, name)) for name in SETUP}

    def save(self, path: Path) -> None:
        parts = {name: getattr(self, name).state_dict() for name in ("policy", "optimizer")}
        parts["scaler"] = self.scaler.state_dict()
        steps = [asdict(step) for step in self.steps]
        state = {"setup": self.setup(), "generator": self.generator.get_state(), "steps": steps}
        save_checkpoint({**state, **parts}, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: It is of a run with other flags, or of another recipe.
        """
        state = load_checkpoint(path)
        if not isinstance(state, dict) or "setup" not in state or "generator" not in state:
            raise ValueError(f"{path}: no checkpoint of this recipe")
        wrong = [name for name, value in self.setup().items() if state["setup"].get(name) != value]
        if wrong:
            was = ", ".join(f"{name} {state['setup'].get(name)}" for name in wrong)
            raise ValueError(f"{path} is of a run with {was}; give the same flags")
        for name in ("policy", "optimizer", "scaler"):
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"])
        self.steps = [Step(**step) for step in state["steps"]]
        if len(self.steps) >= self.args.steps:
            raise ValueError(
                f"{path} has {len(self.steps)} steps already, of --steps {self.args.steps}"
            )


def build_policy(args: argparse.Namespace) -> LlamaForCausalLM:
    """Return a small Llama with random weights, in the precision of the run."""
    config = LlamaConfig(
        vocab_size=rl_task.DIGITS,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
        initializer_range=args.width**-0.5,
    )
    policy = LlamaForCausalLM(config).to(args.device)
    if args.precision != "fp32":
        cast_parameters(policy, DTYPES[args.precision])
    return policy


@torch.no_grad()
def sample(
    policy: LlamaForCausalLM, prompts: Tensor, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw an answer of `length` tokens to each prompt, and return the log-probabilities too.

    Raises:
        ValueError: Prompt and answer are longer than the policy takes.
    """
    longest = policy.config.max_position_embeddings
    if prompts.shape[1] + length > longest:
        raise ValueError(
            f"prompts of {prompts.shape[1]} tokens and answers of {length}: the policy takes "
            f"{longest} in all; shorten one of them (--length), or build a policy that takes more"
        )
    tokens, log_probs, read, cache = [], [], prompts, None
    for _ in range(length):
        output = policy(read, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        scores = output.logits[:, -1].float().log_softmax(-1)
        read = torch.multinomial(scores.exp(), 1, generator=generator)
        tokens.append(read)
        log_probs.append(scores.gather(1, read))
    return torch.cat(tokens, 1), torch.cat(log_probs, 1)


def log_probabilities(policy: nn.Module, prompts: Tensor, answers: Tensor) -> Tensor:
    """Return the log-probability of each token of the answers, read as whole sequences."""
    sequences = torch.cat([prompts, answers], 1)
    logits = policy(sequences[:, :-1], use_cache=False).logits[:, -answers.shape[1] :]
    return logits.float().log_softmax(-1).gather(2, answers.unsqueeze(2)).squeeze(2)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--precision", choices=[*DTYPES], default="fp16", help="of the weights")
    add(
        "--masters",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a float32 copy of 16-bit weights in the optimizer",
    )
    add("--compare", action="store_true", help="all precisions, and bf16 without masters")
    add("--seeds", type=positive, default=1, help="with --compare: from how many seeds")
    add("--steps", type=positive, default=120, help="in all, those before --resume counted")
    add("--prompts", type=positive, default=8, help="a step")
    add("--group", type=positive, default=8, help="answers to each prompt")
    add("--length", type=positive, default=16, help="tokens of an answer")
    # On a GPU the matrix products of a narrow policy may be bitwise equal for any number of rows;
    # then sampling and training compute the same log-probabilities, and there is no mismatch.
    width = "of the policy, a multiple of 8 (default: 64, on a GPU 1024)"
    add("--width", type=positive, default=argparse.SUPPRESS, help=width)
    add("--layers", type=positive, default=4, help="of the policy")
    add("--learning_rate", type=float, default=1.5e-4, help="of FusedAdam")
    add("--loss_scale", type=float, default=2.0**16, help="with fp16, of the first step")
    add("--seed", type=int, default=0, help="of weights, prompts and answers; --compare: the first")
    add("--threads", type=positive, default=1, help="of the CPU")
    add("--save", type=Path, metavar="FILE", help="write a checkpoint at the end")
    add("--resume", type=existing, metavar="FILE", help="go on from a checkpoint")
    add("--save-results", type=Path, metavar="JSON", help="--compare: figures here, picture beside")
    gpu = torch.cuda.is_available() and _C.with_cuda
    add("--device", type=device, default="cuda" if gpu else "cpu", help="cpu or cuda")
    args = parser.parse_args(argv)
    if "width" not in args:
        args.width = 64 if args.device.type == "cpu" else 1024
    if args.group == 1:
        parser.error(
            "--group 1: an answer is compared with the others of its group; give 2 or more"
        )
    if args.width % 8:
        parser.error(f"--width {args.width}: it must be a multiple of 8, for 4 heads of even size")
    if args.compare and (args.save or args.resume):
        parser.error("--compare trains several policies; --save and --resume go without it")
    if args.save_results and not args.compare:
        parser.error("--save-results goes with --compare")
    return args


def train(args: argparse.Namespace, reward: rl_task.Reward = rl_task.reward) -> Run:
    """Train one policy from its start, or from a checkpoint."""
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
    run = Run(args, reward)
    if args.resume:
        run.load(args.resume)
    with tqdm(total=args.steps, initial=len(run.steps), disable=None, file=sys.stderr) as bar:
        bar.set_description(rl_compare.name_of(args))
        run.fit(bar)
    if args.save:
        run.save(args.save)
    return run


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    warn_if_older(transformers="5.23.0")
    torch.set_num_threads(args.threads)
    try:
        if args.compare:
            results = rl_compare.compare(args, train)
        else:
            results = rl_compare.summarise({rl_compare.name_of(args): [train(args)]}, args)
    except (ValueError, OSError, pickle.UnpicklingError) as error:
        sys.exit(f"rl_fp16.py: {error}")
    print(f"\n{rl_compare.table(results)}")
    if args.compare:
        default = Path(__file__).resolve().parents[1] / "output" / "rl" / "rl.json"
        written = rl_compare.write(results, args.save_results or default)
        print("\nWritten:", *map(os.path.relpath, written))


if __name__ == "__main__":
    main()
