"""Handles that are DeepEP's tuples, which programs copy, pack into other tuples and unpack."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

Way = TypeVar("Way")


class TupleHandle(tuple[Any, ...], Generic[Way]):
    """DeepEP's entries, and `way`, which the calls with the handle need. A plain tuple of the same
    entries serves as well: its tensor at `place` leads to the way.

    The way must not hold that tensor. It lives as long as the tensor or a handle.
    """

    way: Way
    place: ClassVar[int]
    _ways: ClassVar[MutableMapping[torch.Tensor, Any]]

    def __init_subclass__(cls, place: int) -> None:
        super().__init_subclass__()
        cls.place = place
        cls._ways = WeakTensorKeyDictionary()

    def __new__(cls, parts: Sequence[Any], way: Way) -> TupleHandle[Way]:
        handle = super().__new__(cls, parts)
        handle.way = way
        cls._ways[handle[cls.place]] = way
        return handle

    def __getnewargs__(self) -> tuple[tuple[Any, ...], Way]:
        return tuple(self), self.way

    def __deepcopy__(self, memo: dict[int, Any]) -> TupleHandle[Way]:
        return type(self)(copy.deepcopy(tuple(self), memo), self.way)

    @classmethod
    def way_of(cls, given: Any) -> Way:
        """The way of a handle, or of a plain tuple or list of its entries. Else: TypeError."""
        if isinstance(given, cls):
            return given.way
        part = given[cls.place] if isinstance(given, tuple | list) and len(given) > 0 else None
        way: Way | None = cls._ways.get(part) if isinstance(part, torch.Tensor) else None
        if way is None:
            raise TypeError(
                f"handle must be that of a dispatch, not {type(given).__name__}; copies of its "
                "tensors do not suffice: keep the handle as it is"
            )
        return way
