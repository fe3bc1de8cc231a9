"""Writes random programs: lists of Python statements over the names of `runner.Space`.

Each takes one road (an optimizer alone, FP16_Optimizer, amp, GradScaler), trains on it for a few
steps, and in between reads, edits, saves, loads and makes mistakes. Nothing of apex_mp is imported.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

SHAPES = [
    "()", "(0,)", "(1,)", "(3,)", "(5,)", "(17,)", "(3, 4)", "(4, 3)", "(2, 3, 2)", "(40, 7)",
]  # fmt: skip
LARGE = ["(16385,)", "(16384,)", "(129, 127)"]
DTYPES = {
    "low": ["[F16]", "[F16]", "[BF16]", "[F16, F32]", "[F16, BF16, F32]", "[F16, F64]"],
    "any": ["[F32]", "[F32]", "[F64]", "[F16]", "[BF16]", "[F32, F64]", "[F16, F32, F64]"],
    "F32": ["[F32]"],
}
ADAM = {
    "lr": ["0.1", "1e-3", "0.0", "torch.tensor(0.05)"],
    "betas": ["(0.0, 0.9)", "(0.5, 0.5)"],
    "eps": ["1e-3", "0.0"],
    "bias_correction": ["False"],
    "eps_inside_sqrt": ["True"],
    "weight_decay": ["0.1"],
    "max_grad_norm": ["1.0", "0.01"],
    "adam_w_mode": ["False"],
    "master_weights": ["True"],
    "maximize": ["True"],
    "unscale_grads": ["True", "False"],
    "set_grad_none": ["True"],
    "capturable": ["True"],
}
WRONG_ADAM = [
    "amsgrad=True", "lr=-1.0", "lr='x'", "lr=nan", "betas=0.9", "betas=(1.0, 0.9)", "betas=(0.9,)",
    "eps=-1.0", "weight_decay=-0.1", "bias_correction=(0.9, 0.999)", "unscale_grads=1",
    "max_grad_norm=None", "lr=torch.tensor([0.1, 0.2])", "lr=torch.tensor(-1.0)",
]  # fmt: skip
SGD = {
    "momentum": ["0.9", "0.5", "1e-60"],
    "dampening": ["0.5"],
    "weight_decay": ["0.1"],
    "wd_after_momentum": ["True"],
    "materialize_master_grads": ["False"],
    "set_grad_none": ["True"],
    "max_grad_norm": ["1.0", "0.01"],
    "unscale_grads": ["True", "False"],
}
WRONG_SGD = [
    "lr=-1.0", "lr='x'", "lr=0.1, momentum=-0.5", "lr=0.1, nesterov=True", "momentum=0.9",
    "lr=0.1, momentum=0.9, dampening=0.5, nesterov=True", "lr=0.1, weight_decay=nan",
    "lr=0.1, unscale_grads='no'", "lr=0.1, max_grad_norm=-1", "lr=True, momentum=True",
]  # fmt: skip
TORCH = ["SGD", "AdamW", "Adam", "RMSprop", "Adagrad", "LBFGS"]
FP16 = {
    "static_loss_scale": ["128.0", "2.0**14", "1.0", "3.0"],
    "dynamic_loss_scale": [
        "True", "True", "True", "fp16_utils.DynamicLossScaler(init_scale=2.0**10, scale_window=2)",
        "loss_scale.DynamicLossScale(2.0**12, growth_interval=2)",
    ],
    "dynamic_loss_args": ["{'init_scale': 2.0**8, 'scale_window': 2}", "{'scale_factor': 4.0}"],
    "verbose": ["False"],
    "model": ["model"],
    "clip": ["'global'"],
}  # fmt: skip
WRONG_FP16 = [
    "static_loss_scale=0.0", "static_loss_scale='dynamic'", "clip='x'", "dynamic_loss_scale=3",
    "dynamic_loss_scale=True, dynamic_loss_args={'init_scale': -1.0}", "static_loss_scale=inf",
    "dynamic_loss_scale=True, dynamic_loss_args={'scale': 1.0}", "optimizer=optimizer",
]  # fmt: skip
WRONG_CALLS = [
    "missing", "none", "shape", "integers", "kind", "output shape", "output is param", "inf",
    "output twice", "output none", "sparse",
]  # fmt: skip
# Edits between statements; {n} is a small number, {seed} a large one, {x} a hyperparameter.
EDITS = [
    "optimizer.param_groups[0]['lr'] = {x}",
    "optimizer.param_groups[-1]['lr'] = torch.tensor({x})",
    "optimizer.param_groups[-1]['lr'] = -0.1",
    "optimizer.param_groups[0]['lr'] = 'fast'",
    "optimizer.param_groups[0]['weight_decay'] = {x}",
    "optimizer.param_groups[-1]['momentum'] = {x}",
    "optimizer.param_groups[0]['momentum'] = -1",
    "optimizer.param_groups[0]['dampening'] = {x}",
    "optimizer.param_groups[0]['nesterov'] = True",
    "optimizer.param_groups[0]['betas'] = ({x}, 0.9)",
    "optimizer.param_groups[0]['betas'] = torch.tensor([0.5, 0.9])",
    "optimizer.param_groups[0]['betas'] = 0.9",
    "optimizer.param_groups[0]['eps'] = {x}",
    "optimizer.param_groups[0]['eps'] = None",
    "optimizer.param_groups[-1]['max_grad_norm'] = {x}",
    "optimizer.param_groups[0]['bias_correction'] = False",
    "optimizer.param_groups[0]['master_weights'] = True",
    "optimizer.param_groups[0]['amsgrad'] = True",
    "del optimizer.param_groups[0]['lr']",
    "optimizer.param_groups[0]['note'] = 'mine'",
    "optimizer.add_param_group({{'params': [model.spare(0)], 'lr': {x}}})",
    "optimizer.add_param_group({{'params': model.spare(1)}})",
    "optimizer.add_param_group({{'params': [model.spare(1)], 'weight_decay': -1.0}})",
    "optimizer.add_param_group({{'params': [model_of({n})]}})",
    "optimizer.add_param_group({{'params': [torch.zeros(3).long()]}})",
    "optimizer.add_param_group({{'params': [nn.Parameter(torch.ones(3, device='meta'))]}})",
    "optimizer.refresh_hyperparameters()",
    "optimizer.param_groups.pop()",
    "optimizer.param_groups[0]['params'].reverse()",
    "optimizer.param_groups[0]['params'].append(model.spare(0))",
    "P({n}).data = values({seed}, P({n}).shape).to(P({n}).dtype)",
    "model_of({n}).data = values({seed}, model_of({n}).shape).to(model_of({n}).dtype)",
    "model_of({n}).data = model_of({n}).data.double()",
    "model_of({n}).detach().mul_({x})",
    "P({n}).detach().add_({x})",
    "P({n}).detach().fill_(inf)",
    "model.half()",
    "model.float()",
    "model_of({n}).requires_grad_(False)",
    "model_of({n}).requires_grad_(True)",
    "model_of({n}).grad = None",
    "model_of({n}).grad = model_of({n} + 1).grad",
    "model_of({n}).grad.mul_({x})",
    "P({n}).grad = None",
    "P({n}).grad.mul_({x})",
    "P({n}).grad.data.mul_({x})",
    "P({n}).grad = P({n}).grad.clone().t()",
    "P({n}).grad.view(-1)[0] = inf",
    "P({n}).grad = values({seed}, P({n}).shape).to(P({n}).dtype)",
    "optimizer.state.clear()",
    "optimizer.state.pop(P({n}))",
    "S({n})['step'] = 5",
    "S({n})['step'] = 'five'",
    "S({n})['step'] = torch.tensor(3.0)",
    "S({n})['exp_avg'] = S({n})['exp_avg'].double()",
    "S({n})['exp_avg'] = S({n})['exp_avg'].clone().t()",
    "S({n})['exp_avg'] = torch.zeros(7)",
    "S({n})['exp_avg_sq'] = None",
    "S({n})['exp_avg'].fill_({x})",
    "del S({n})['exp_avg']",
    "S({n})['momentum_buffer'] = None",
    "S({n})['momentum_buffer'].fill_({x})",
    "S({n})['momentum_buffer'] = S({n})['momentum_buffer'].half()",
    "S({n})['momentum_buffer'] = torch.ones(7)",
    "S({n})['mine'] = values({seed}, (2,))",
    "optimizer.register_step_pre_hook(lambda *_: print('before'))",
    "optimizer.register_step_post_hook(lambda *_: print('after'))",
    "optimizer.register_step_pre_hook(lambda o, *_: print(P(0).grad.mul_(0.5)))",
    "torch.optim.lr_scheduler.StepLR(optimizer, 1, {x}).step()",
    "optimizer.unscale_grads = True",
]
READS = [
    "look()",
    "P({n}).grad",
    "model_of({n}).grad",
    "repr(optimizer)",
    "[*map(type, optimizer.state.values())]",
    "torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]['params'], {x})",
    "fp16_utils.clip_grad_norm(optimizer.param_groups[0]['params'], {x})",
    "[p.grad is None for p in amp.master_params(optimizer)]",
    "convert.to_float32(model.state_dict())",
    "convert.masters(model, optimizer)",
    "fp16_utils.network_to_half(copy.deepcopy(model))",
    "fp16_utils.model_grads_to_master_grads(*fp16_utils.prep_param_lists(model))",
    "fp16_utils.master_params_to_model_params(*fp16_utils.prep_param_lists(model))",
    "optimizer.zero_grad(set_to_none=False)",
    "optimizer.zero_grad(set_to_none=True)",
    "optimizer.zero_grad()",
    "model.zero_grad()",
    "model.zero_grad(set_to_none=False)",
    "backward({seed}, without=({n},))",
    "set_grads({seed})",
    "set_grads({seed}, 'turned')",
    "set_grads({seed}, 'strided')",
    "set_grads({seed}, 'offset')",
    "set_grads({seed}, 'expanded')",
    "set_grads({seed}, 'sparse')",
    "set_grads({seed}, 'shared')",
    "set_grads({seed}, 'overlapping')",
    "set_grads({seed}, 'some', 100.0)",
    "set_grads({seed}, 'inference')",
    "set_grads({seed}, bad=({n}, inf))",
    "set_grads({seed}, bad=({n}, nan))",
    "optimizer.step()",
    "optimizer.step(closure({seed}))",
    "optimizer.step(closure({seed}, bad=({n}, inf)))",
]
OF_FP16 = [
    "optimizer.clip_master_grads({x})",
    "optimizer.clip_master_grads(1.0, inf)",
    "optimizer.inspect_master_grad_data()",
    "optimizer.update_master_grads()",
    "optimizer.loss_scale",
    "optimizer.overflow",
    "optimizer.overflow_report",
    "optimizer.loss_scale = 64.0",
    "optimizer.loss_scale = -1.0",
    "optimizer.overflow = True",
    "optimizer.loss_scaler = fp16_utils.DynamicLossScaler(init_scale=4.0, scale_window=1)",
    "optimizer.loss_scaler.cur_scale = 2.0**20",
    "optimizer.dynamic_loss_scale = True",
    "optimizer.dynamic_loss_scale = False",
    "optimizer.scale_window = 1",
    "optimizer.cur_iter = 7",
    "optimizer.fp32_groups_flat[0].mul_({x})",
    "optimizer.optimizer.step()",
    "optimizer.optimizer.register_step_pre_hook(lambda *_: print('inside'))",
    "optimizer.optimizer.register_step_post_hook(lambda *_: print('inside'))",
    "optimizer.load_state_dict(optimizer.optimizer.state_dict())",
    "optimizer.add_param_group({{'params': [model.spare(0)], 'max_grad_norm': {x}}})",
    "optimizer.first_closure_call_this_step",
    "optimizer.zero_grad(True)",
    "optimizer.zero_grad(set_grads_to_None=False)",
    "backward({seed}, update_master_grads=False)",
    "backward({seed}, retain_graph=True)",
    "optimizer.backward(torch.ones(()))",
    "optimizer.backward(3)",
    "backward({seed}, 1e38)",
    "fp16_utils.prep_param_lists(model)",
    "convert.load(model, model.state_dict(), optimizer)",
    "fp16_utils.FP16_Optimizer(optimizer)",
]
OF_AMP = [
    "amp.state_dict()",
    "amp.load_state_dict(amp.state_dict())",
    "amp.load_state_dict({{'loss_scaler0': {{'loss_scale': 64.0, 'unskipped': 3}}}})",
    "amp.load_state_dict({{'loss_scaler0': {{'loss_scale': 'x', 'unskipped': 3}}}})",
    "amp.load_state_dict({{'mine': 1}})",
    "amp.step_was_skipped(optimizer)",
    "backward({seed}, delay_unscale=True)",
    "backward({seed}, delay_overflow_check=True)",
    "backward({seed}, loss_id=1)",
    "with amp.disable_casts(): backward({seed})",
    "amp.clear_cache()",
    "handle.load_state_dict(handle.state_dict())",
    "handle.is_active()",
    "handle._clear_cache()",
    "backward({seed}, 1e38)",
    "amp.initialize(model, optimizer, opt_level='O2')",
    "amp.scale_loss(3, optimizer).__enter__()",
]
OF_SCALER = [
    "scaler.unscale_(optimizer)",
    "scaler.step(optimizer)",
    "scaler.update()",
    "scaler.update(4.0)",
    "scaler.get_scale()",
    "scaler.load_state_dict(scaler.state_dict())",
    "scaler.step(optimizer, grads=[])",
    "scaler.step(optimizer, closure({seed}))",
    "optimizer.step()",
    "optimizer.load_state_dict(scaler.state_dict())",
]
LOADS = [
    "optimizer.load_state_dict(optimizer.state_dict())",
    "optimizer.load_state_dict(through_file(optimizer.state_dict()))",
    "optimizer.load_state_dict(through_file(optimizer.state_dict(), safe=True))",
    "optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))",
    "optimizer.load_state_dict(kept)",
    "model.load_state_dict(model.state_dict())",
    "optimizer.load_state_dict(stepped(torch.optim.{torch}(model.groups(1), lr=0.1)).state_dict())",
    "optimizer.load_state_dict(stepped(FusedAdam(model.groups(1))).state_dict())",
    "optimizer.load_state_dict(stepped(FusedSGD(model.groups(1), 0.1, 0.9)).state_dict())",
    "stepped(torch.optim.{torch}(model.groups(1), lr=0.1), optimizer.state_dict())",
    "optimizer.load_state_dict({{}})",
    "optimizer.load_state_dict(3)",
    "optimizer.load_state_dict(model.state_dict())",
    "kept = optimizer.state_dict()",
    "kept = copy.deepcopy(optimizer.state_dict())",
    "kept = through_file(optimizer.state_dict())",
    "kept['param_groups'][0]['amsgrad'] = True",
    "kept['param_groups'][0]['lr'] = -1.0",
    "kept['param_groups'][0]['params'].pop()",
    "kept['param_groups'][0].pop('weight_decay')",
    "kept['param_groups'][0]['step'] = 4",
    "kept['param_groups'].append(kept['param_groups'][0])",
    "kept['state'][0].pop('step')",
    "kept['state'][0]['step'] = -1",
    "kept['state'][0]['exp_avg'] = torch.zeros(7)",
    "kept['state'][0]['exp_avg'] = 3",
    "kept['state'][0]['momentum_buffer'] = torch.zeros(7)",
    "kept['state'][0]['momentum_buffer'] = 'x'",
    "kept['state'].clear()",
    "kept['state'][99] = {{}}",
    "kept['optimizer_state_dict']['state'].clear()",
    "kept['cur_scale'] = -3.0",
    "kept['fp32_groups_flat'][0] = torch.zeros(3)",
    "kept['fp32_from_fp16'][0].pop()",
    "kept.pop('optimizer_state_dict')",
    "model, optimizer = copy.deepcopy((model, optimizer))",
    "model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))",
    "model, optimizer = through_file((model, optimizer))",
    "optimizer = copy.deepcopy(optimizer)",
    "optimizer = pickle.loads(pickle.dumps(optimizer))",
    "model = copy.deepcopy(model)",
]


class Writer:
    """Writes one program.

    Args:
        seed: Of all choices.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.road = self.pick(ROADS)
        self.fused = self.pick(["FusedAdam", "FusedAdam", "FusedSGD"])
        self.setup: list[str] = []
        getattr(self, f"begin_{self.road[0]}")(*self.road[1:])

    def pick(self, choices: Sequence[Any]) -> Any:
        return self.random.choice(choices)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def options(self, table: dict[str, list[str]], each: float = 0.2) -> str:
        chosen = [f"{name}={self.pick(table[name])}" for name in table if self.chance(each)]
        return "".join(f", {option}" for option in chosen)

    def fill(self, line: str) -> str:
        x = self.pick(["0.5", "0.01", "2.0", "0.0"])
        return line.format(
            n=self.random.randrange(6), seed=self.seed(), x=x, torch=self.pick(TORCH)
        )

    def seed(self) -> int:
        return self.random.randrange(10**6)

    # How programs begin.

    def model(self, kind: str, layers: float = 0.0) -> None:
        shapes = [self.pick(SHAPES) for _ in range(self.random.randint(2, 6))]
        if self.chance(0.1):
            shapes[0] = self.pick(LARGE)
        more = ", layers=True" if self.chance(layers) else ""
        dtypes = self.pick(DTYPES[kind])
        self.setup.append(f"model = Net({self.seed()}, [{', '.join(shapes)}], {dtypes}{more})")

    def optimizer(self, only_fused: bool = False) -> None:
        many = self.pick(["1", "1", "2", "2, {'weight_decay': 0.5}", "2, {}, {'lr': 0.3}"])
        params = f"model.groups({many}, spare={self.random.randrange(3)})"
        if self.chance(0.1):
            params = self.pick(["[*model.parameters()]", "[*model.named_parameters()]"])
        if not only_fused and self.chance(0.2):
            kind = self.pick(TORCH)
            if kind == "LBFGS":  # It has one group.
                params = "[*model.parameters()]"
            self.setup.append(f"optimizer = torch.optim.{kind}({params}, lr=0.1)")
            return
        adam = self.fused == "FusedAdam"
        lr = "" if adam else f", lr={self.pick(ADAM['lr'])}"
        options = self.options(ADAM if adam else SGD)
        if ", momentum=" in options and "dampening" not in options and self.chance(0.5):
            options += ", nesterov=True"
        self.setup.append(f"optimizer = {self.fused}({params}{lr}{options})")
        if adam and self.chance(0.08):
            self.setup.append("two_devices()")

    def begin_bare(self) -> None:
        self.model("any")
        self.optimizer(only_fused=True)
        if self.chance(0.1):
            self.setup.append("optimizer = parallel.LARC(optimizer)")

    def begin_fp16(self, module: str) -> None:
        self.model("low", layers=0.1)
        self.optimizer()
        options = self.options(FP16, 0.35)
        self.setup.append(f"optimizer = {module}.FP16_Optimizer(optimizer{options})")

    def begin_handle(self) -> None:
        self.model("any", layers=0.6)
        self.optimizer()
        scale = self.pick(["", "loss_scale=128.0", "dtype=BF16", "enable_caching=False"])
        self.setup.append(f"handle = amp.init({scale})")
        if self.chance(0.4):
            number = self.pick(["", ", num_loss=2"])
            self.setup.append(f"optimizer = handle.wrap_optimizer(optimizer{number})")

    def begin_initialize(self, level: str) -> None:
        self.model("F32", layers=0.6)
        self.optimizer()
        extra = self.pick(["", "", ", loss_scale=64.0", ", num_losses=2", ", dtype=BF16"])
        extra += self.pick(
            ["", "", "", ", verbosity=0", ", loss_scale='dynamic'"] * (not extra) + [""]
        )
        self.setup.append(
            f"model, optimizer = amp.initialize(model, optimizer, opt_level='{level}'{extra})"
        )

    def begin_scaler(self) -> None:
        self.model("any")
        self.optimizer()
        self.setup.append(
            "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**10, growth_interval=2)"
        )

    # What they do then.

    def wrong_constructor(self) -> str:
        if self.chance(0.3):
            return f"fp16_utils.FP16_Optimizer(FusedAdam(model.groups(1)), {self.pick(WRONG_FP16)})"
        if self.chance(0.5):
            return f"FusedAdam(model.groups(1), {self.pick(WRONG_ADAM)})"
        return f"FusedSGD(model.groups(1), {self.pick(WRONG_SGD)})"

    def legacy_step(self) -> str:
        arguments = [f"{self.seed()}", repr(self.pick(["nested", "nested", "flat", "generator"]))]
        if self.chance(0.7):
            arguments.append(f"outputs={self.pick(['F16', 'F16', 'BF16', 'F32', 'F64'])}")
        if self.chance(0.5):
            arguments.append(f"dtype={self.pick(['F16', 'BF16', 'F32', 'F64'])}")
        if self.chance(0.2):
            arguments.append(f"wrong={self.pick(WRONG_CALLS)!r}")
        if self.chance(0.6):
            arguments.append(f"scale={self.pick(['128.0', '3.0', 'torch.tensor(8.0)', '0.0'])}")
        if self.chance(0.3):
            norms = ["[4.0]", "[1.0, 2.0]", "[torch.tensor(3.0)]", "[inf]", "[0.0]"]
            arguments.append(f"grad_norms={self.pick(norms)}")
        return f"optimizer.step(**legacy({', '.join(arguments)}))"

    def direct_adam(self) -> str:
        """The compiled function of 2018, through which nothing but numbers go."""
        numbers = ", ".join(self.pick(["0.1", "0.5", "0.0"]) for _ in range(2))
        return (
            f"fused_adam_cuda.adam(P(0).detach(), torch.tensor([]), values({self.seed()}, P(0)"
            f".shape).float(), torch.ones(P(0).shape), values(1, P(0).shape).float(), 0.1, "
            f"{numbers}, 1e-8, 2.0, {self.random.randrange(4)}, {self.random.randrange(2)}, 1, 0.1)"
        )

    def anything(self) -> list[str]:
        """Some statements that do not belong to the loop."""
        of_road = {"fp16": OF_FP16, "handle": OF_AMP, "initialize": OF_AMP, "scaler": OF_SCALER}
        kinds: list[tuple[float, Callable[[], str]]] = [
            (6, lambda: self.pick(EDITS)),
            (6, lambda: self.pick(READS)),
            (4, lambda: self.pick(LOADS)),
            (6, lambda: self.pick(of_road.get(self.road[0], READS))),
        ]
        kinds = [(weight, lambda make=make: self.fill(make())) for weight, make in kinds]  # type: ignore[misc]
        kinds += [(3, self.wrong_constructor), (0.3, self.direct_adam)]
        if self.road[0] in ("bare", "scaler"):
            kinds.append((6, self.legacy_step))
        if self.chance(0.05):  # Into new ones, as after a restart.
            return ["kept = through_file(optimizer.state_dict())", *self.setup,
                    "optimizer.load_state_dict(kept)"]  # fmt: skip
        (_, make), *_ = self.random.choices(kinds, [weight for weight, _ in kinds])
        line = make()
        if line.startswith(("kept[", "kept.")):  # A state that is loaded after an edit.
            save = self.pick(["copy.deepcopy(optimizer.state_dict())", "optimizer.state_dict()"])
            return [f"kept = {save}", line, "optimizer.load_state_dict(kept)"]
        return [line]

    def one_step(self) -> list[str]:
        bad = ""
        if self.chance(0.15):
            bad = f", bad=({self.random.randrange(3)}, {self.pick(['inf', 'nan', '-inf', '1e6'])})"
        magnitude = self.pick(["", "", "", ", 1e-6", ", 100.0"])
        lines = [f"backward({self.seed()}{magnitude}{bad})"]
        if self.chance(0.1):
            lines *= 2
        if self.road[0] in ("bare", "scaler") and self.chance(0.2):
            forms = [line for line in READS if line.startswith("set_grads")]
            lines.append(self.fill(self.pick(forms)))
        if self.chance(0.35):
            lines += self.anything()
        if self.road[0] == "scaler":
            if self.chance(0.3):
                lines.append("scaler.unscale_(optimizer)")
            lines += ["scaler.step(optimizer)", "scaler.update()"]
        elif self.road[0] == "bare" and self.chance(0.4):
            lines = [self.legacy_step()]
        elif self.chance(0.1) or "LBFGS" in "".join(self.setup):
            lines = [f"optimizer.step(closure({self.seed()}{magnitude}{bad}))"]
        else:
            lines.append("optimizer.step()")
        if self.chance(0.8):
            lines.append(self.pick(["optimizer.zero_grad()", "model.zero_grad()"]))
        return lines

    def program(self) -> list[str]:
        lines = [*self.setup]
        for _ in range(self.random.randint(2, 5)):
            lines += self.one_step()
            for _ in range(self.random.choice([0, 0, 1, 2])):
                lines += self.anything()
        if self.chance(0.25):
            lines = [line for one in lines for line in (one, "look()")]
        return [*lines, "look()"]


ROADS: list[tuple[str, ...]] = [
    ("bare",), ("bare",), ("bare",), ("fp16", "fp16_utils"), ("fp16", "fp16_utils"),
    ("fp16", "optimizers"), ("fp16", "optimizers"), ("handle",), ("initialize", "O1"),
    ("initialize", "O2"), ("initialize", "O2"), ("initialize", "O3"), ("initialize", "O0"),
    ("scaler",), ("scaler",),
]  # fmt: skip


def write(seed: int) -> list[str]:
    """Return the program of a seed."""
    return Writer(seed).program()


def write_fixture(seed: int, path: str) -> tuple[list[str], list[str]]:
    """Return a program that saves a training to a file, and one that goes on from that file."""
    writer = Writer(seed)
    trained = [*writer.setup, *writer.one_step(), *writer.one_step(), *writer.one_step()]
    more = [*writer.one_step(), *writer.one_step(), *writer.one_step(), "look()"]
    states = "(model.state_dict(), optimizer.state_dict(), amp.state_dict())"
    if writer.chance(0.5):  # FP16_Optimizer refuses the first of these.
        saved = writer.pick(["(model, optimizer, amp.state_dict())", f"({states[1:-1]})"])
    else:
        saved = states
    save = f"torch.save({saved}, {path!r})"
    load = [f"kept = torch.load({path!r}, weights_only=False)"]
    if saved == states:
        load += [
            *writer.setup,
            "model.load_state_dict(kept[0])",
            "optimizer.load_state_dict(kept[1])",
        ]
    else:
        begin = writer.setup if writer.road[0] in ("handle", "initialize") else []
        load += [*begin, "model, optimizer = kept[:2]"]
    if writer.road[0] == "initialize":
        load.append("amp.load_state_dict(kept[2])")
    if writer.road[0] == "scaler" and saved != states:
        load.append(writer.setup[-1])
    return [*trained, save], [*load, *more]
