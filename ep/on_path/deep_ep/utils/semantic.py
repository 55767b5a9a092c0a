"""Small helpers of DeepEP's own classes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


def value_or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def weak_lru(maxsize: int | None = 128, typed: bool = False) -> Callable[[Any], Any]:
    """functools.lru_cache for methods: the cache does not keep their objects alive."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.lru_cache(maxsize, typed)
        def cached(owner: weakref.ref[Any], *arguments: Any, **named: Any) -> Any:
            return method(owner(), *arguments, **named)

        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            return cached(weakref.ref(self), *arguments, **named)

        return call

    return decorate
