"""A load plan as ranks exchange it: its rank gets the items back, and other ranks need not make objects of them."""

from __future__ import annotations

import pickle
import secrets
from dataclasses import fields
from typing import Any
from weakref import WeakValueDictionary

from torch.distributed.checkpoint.planner import LoadPlan, ReadItem


class ExchangedPlan(LoadPlan):
    """A plan that DCP sends from its rank to rank 0, and back.

    In the process that made it, a pickled plan becomes one with the same items. They must not change in between. In
    another process the items are bytes until someone asks for them. Planners see a :class:`LoadPlan` on all ranks, and
    may change it.

    Unpickling makes many objects, so the garbage collector runs. A full collection takes a tenth of a second. Rank 0
    would unpickle the items of all ranks. One thread at a time may use a plan.
    """

    @classmethod
    def of(cls, plan: LoadPlan) -> ExchangedPlan:
        """Make an exchanged plan with the items and all other attributes of ``plan``."""
        return cls._made(plan.items, vars(plan))

    @classmethod
    def _made(cls, items: list[ReadItem], others: dict[str, Any]) -> ExchangedPlan:
        made = cls.__new__(cls)
        token = secrets.token_bytes(16)
        vars(made).update(others, items=items, _token=token)
        _MADE[token] = made
        return made

    @property
    def items(self) -> list[ReadItem]:
        """The plan's items. Another process's plan unpickles them at the first call, and drops their bytes then."""
        own = vars(self)
        if "_pickled" in own:
            self.items = pickle.loads(own["_pickled"])
        items: list[ReadItem] = own["items"]
        return items

    @items.setter
    def items(self, items: list[ReadItem]) -> None:
        own = vars(self)
        own["items"] = items
        for name in ("_token", "_pickled"):
            own.pop(name, None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LoadPlan):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in fields(self))

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        own = vars(self)
        if "_token" not in own:
            return super().__reduce_ex__(protocol)
        others = {name: value for name, value in own.items() if name not in ("items", "_token", "_pickled")}
        pickled = own["_pickled"] if "_pickled" in own else pickle.dumps(self.items)
        return _received, (own["_token"], pickled, others)


_MADE: WeakValueDictionary[bytes, ExchangedPlan] = WeakValueDictionary()
"""The plans that this process has made, by their tokens."""


def _received(token: bytes, pickled: bytes, others: dict[str, Any]) -> ExchangedPlan:
    made = _MADE.get(token)
    if made is not None:
        return ExchangedPlan._made(list(made.items), others)
    plan = ExchangedPlan.__new__(ExchangedPlan)
    vars(plan).update(others, _token=token, _pickled=pickled)
    return plan
