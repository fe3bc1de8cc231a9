"""Checkpoints and pickles of a fused optimizer, and how those of other optimizers are read."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from apex_mp.core import options
from apex_mp.core.log import logger
from apex_mp.core.state_checks import as_dict, check_optimizer_state
from apex_mp.masters import codes, layout
from apex_mp.masters.store import MASTER, MasterStore, StateView
from apex_mp.saved.dcp import attribute_with_checkpoint_view

_LOG = logger("apex_mp.optimizers")
# Of a file these options do not count.
_CHOSEN_HERE = ("moment_dtype", "stochastic_rounding")


class SavedOptimizer(torch.optim.Optimizer):
    """The part of `FusedOptimizer` that saves and loads."""

    # --- Defined by each optimizer.

    # The class's name in messages; a user's subclass has another one.
    _public_name: str
    _rule: layout.Rule
    # The optimizer of torch that loads what this one saves.
    _in_torch: Any = None
    # Attributes that are pickled beside state and options.
    _pickled: tuple[str, ...] = ("unscale_grads", "offload")
    # Whether masters and moments are in host memory, and gradients, too.
    offload: bool | str = False
    _own_masters: MasterStore

    def _check_options(self, group: Mapping[str, Any]) -> None:
        """Raise a TypeError, ValueError or RuntimeError for a hyperparameter that is not valid.

        Args:
            group: A parameter group with all options, or the defaults.
        """
        options.check_group(self._public_name, group)

    def _add_names_of_others(self, group: dict[str, Any]) -> None:
        """Add the names by which other optimizers know options of a group that is saved."""

    def _adapt_group(
        self, number: int, group: dict[str, Any], states: dict[Any, dict[str, Any]]
    ) -> None:
        """Rename in place what another optimizer has saved, to the names used here.

        This method does it for the step count, which apex had in the group and not in the states.

        Args:
            number: The number of the group.
            group: A copy of the saved group.
            states: The saved states by the items of `group["params"]`; replace them, do not write
                to them.
        """
        if "step" in self._rule.layout.numbers and group.get("step") is not None:
            step = group.pop("step")
            for index in group["params"]:
                if states.get(index):
                    states[index] = {"step": step, **states[index]}

    def _adapt_state(self, where: str, state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        """Return a parameter's saved state in the layout used here; see `StateLayout.loaded`."""
        return self._rule.layout.loaded(where, state, param, self._state_device)

    @property
    def _state_device(self) -> torch.device | None:
        """Where states are made; None: with their parameters."""
        return torch.device("cpu") if self.offload else None

    state = attribute_with_checkpoint_view("state", torch.optim.Optimizer)

    def _checkpoint_view(self) -> StateView:
        return StateView(self)

    # --- What users call.

    def master(self, param: Tensor) -> Tensor:
        """Return a copy of the values that steps work on: float32, or float64 for float64.

        They are those of the parameter's master, kept whole or split, or of the parameter.

        Args:
            param: A parameter of a group.

        Raises:
            ValueError: It is in no group.
        """
        layout.check_own(f"{self._public_name}.master", self, param)
        self._own_masters.put_back(self)
        return self._own_masters.whole_of(param)

    def state_dict(self, *, compact: bool = False, for_torch: bool = False) -> dict[str, Any]:
        """Return state and options.

        Args:
            compact: Save split masters as they are kept, in 2 bytes for each element, which are
                valid only with the same weights, and moments of one byte; else as float32, which
                other optimizers load too [False].
            for_torch: Leave out what the optimizer of torch that does the same does not have:
                masters, and options of this class [False].

        Raises:
            ValueError: `for_torch` is set, and no optimizer of torch does the same.
        """
        self._rule.tidy(self.state)
        self._own_masters.put_back(self)
        saved = super().state_dict()
        if not compact:
            names = self._rule.layout.tensors
            saved["state"] = {
                key: codes.widened(state, names) for key, state in saved["state"].items()
            }
        for group, saved_group in zip(self.param_groups, saved["param_groups"], strict=True):
            for param, index in zip(group["params"], saved_group["params"], strict=True):
                state = saved["state"].get(index)
                master = self._own_masters.saved(param, compact=compact)
                if master is None or (state is None and self._own_masters.is_weight(param)):
                    continue
                if state is None:  # The master was loaded before the first step.
                    layout = self._rule.layout_of(group)
                    state = layout.completed({}, param, group, self._state_device)
                saved["state"][index] = {**state, MASTER: master}
        for group in saved["param_groups"]:
            self._add_names_of_others(group)
        if for_torch:
            self._leave_torchs(saved)
        return saved

    def _leave_torchs(self, saved: dict[str, Any]) -> None:
        if self._in_torch is None:
            raise ValueError(
                f"{self._public_name}.state_dict: for_torch is True; it must be False, because no "
                "optimizer of torch does the same"
            )
        known = {*self._in_torch([torch.empty(0)]).param_groups[0], "initial_lr", "param_names"}
        saved["param_groups"] = [
            {name: value for name, value in group.items() if name in known}
            for group in saved["param_groups"]
        ]
        saved["state"] = {
            key: {name: value for name, value in state.items() if name != MASTER}
            for key, state in saved["state"].items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of this optimizer, or of torch's that does the same.

        Options that the saved groups lack stay as they are here; so do the dtypes in which masters
        and moments are kept. State tensors become float32 (float64 for float64 parameters),
        whatever the parameter's dtype; the next step converts them. Tensors are copied.

        Raises:
            RuntimeError: The state was saved with an option that this optimizer does not have.
            TypeError, ValueError: Groups do not fit, a hyperparameter is out of range, or a
                parameter's state is not that of such an optimizer.
        """
        masters: dict[Tensor, Tensor] = {}

        def adapt(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            adapted = self._adapted(saved, masters)
            for group in adapted["param_groups"]:
                self._check_options({**self.defaults, **group})
            return adapted

        before = [_options(group) for group in self.param_groups]
        # A hook, so that it runs after the user's hooks have changed the state.
        handle = self.register_load_state_dict_pre_hook(adapt)
        try:
            super().load_state_dict(as_dict(self._public_name, state_dict))
        finally:
            handle.remove()
        self._own_masters.load(masters)
        changes = [
            f"{name} of group {number} is {value!r} as in the file, and was {old[name]!r}"
            for number, (old, group) in enumerate(zip(before, self.param_groups, strict=True))
            for name, value in _options(group).items()
            if name in old and old[name] != value
        ]
        if changes:
            _LOG.info("%s.load_state_dict: %s", self._public_name, "; ".join(changes))

    def _adapted(self, saved: Mapping[str, Any], masters: dict[Tensor, Tensor]) -> dict[str, Any]:
        """Return a saved state_dict in the layout used here, for load_state_dict and `unpack`.

        Args:
            saved: The state_dict.
            masters: Its masters are added.
        """
        check_optimizer_state(self._public_name, saved)
        states: dict[Any, Any] = dict(saved["state"])
        saved_groups: list[dict[str, Any]] = [dict(group) for group in saved["param_groups"]]
        for number, saved_group in enumerate(saved_groups):
            self._adapt_group(number, saved_group, states)
            for option in _CHOSEN_HERE:
                saved_group.pop(option, None)
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved_groups] != sizes:
            # torch says in which way they do not fit.
            return {**saved, "param_groups": saved_groups}
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            for index, param in zip(saved_group["params"], group["params"], strict=True):
                state = states.get(index)
                if not state:
                    continue
                where = f"{self._public_name}.load_state_dict: state[{index}]"
                rest = {name: value for name, value in state.items() if name != MASTER}
                if MASTER in state:
                    device = self._state_device
                    master = layout.loaded_master(where, state[MASTER], param, device)
                    masters.update({} if master is None else {param: master})
                if rest:
                    states[index] = self._adapt_state(where, rest, param)
                else:
                    del states[index]
            # What was asked for here stays. Without masters here the file says whether there are.
            for option in _CHOSEN_HERE:
                if option in group:
                    saved_group[option] = group[option]
            if group.get("master_weights"):
                saved_group["master_weights"] = group["master_weights"]
            for option in self.defaults:
                if option in group:  # an unpickled optimizer has a default more, of torch's
                    saved_group.setdefault(option, group[option])
        return {**saved, "state": states, "param_groups": saved_groups}

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: masters are among the state."""
        self._rule.tidy(self.state)
        self._own_masters.put_back(self)
        own = {name: getattr(self, name) for name in self._pickled}
        states = self._own_masters.beside(collections.defaultdict(dict, self.state))
        return {**super().__getstate__(), **own, "state": states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        states = layout.unpack(state["state"])
        masters = {p: s.pop(MASTER) for p, s in states.items() if MASTER in s}
        for param in masters:
            if not states[param]:
                del states[param]
        if "_own_masters" not in vars(self):  # Else load_state_dict calls this.
            self._own_masters = MasterStore()
        self._own_masters.kept.update(masters)
        super().__setstate__({**state, "state": states})


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that no schedule changes, as plain values."""
    changing = ("params", "param_names", "lr", "initial_lr")
    return {
        name: value
        for name, value in group.items()
        if name not in changing and not torch.is_tensor(value)
    }
