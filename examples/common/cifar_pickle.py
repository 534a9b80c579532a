"""Reads the pickles of CIFAR-10's python version without `pickle`.

With `pickle` a file from a stranger could run any code, or with harmless classes alone take any memory. Here nothing is
called, and memory is bounded by the file's size.
"""

import pickletools
from typing import Any, NamedTuple

import numpy as np

MOST_PARTS = 200_000  # the official files have about 40,000
CALLED = {
    *("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct", "numpy dtype"),
    "_codecs encode",  # how Python 3 writes bytes for Python 2
}
NAMED = {*CALLED, "numpy ndarray"}
VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class Call(NamedTuple):
    """A call that the pickle asks for.

    Attributes:
      name: module and name of what is called.
      arguments: of the call.
      state: what the result's state is set to comes last.
    """

    name: str
    arguments: tuple
    state: list


def read_batch(content: bytes) -> tuple[np.ndarray, list]:
    """The pixels uint8[n, 3072] of a batch of CIFAR-10, and its labels, n values of any type.

    Raises:
      ValueError, LookupError, TypeError: it is no such batch.
    """
    batch = _build(content)
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
        raise ValueError("it has no data and labels")
    labels, array = batch[b"labels"], batch[b"data"]
    if not isinstance(labels, list) or not isinstance(array, Call) or not array.name.endswith(" _reconstruct"):
        raise ValueError("its labels are no list, or its data no array")
    _, shape, dtype, by_columns, pixels = array.state[-1]
    if not isinstance(dtype, Call) or dtype.name != "numpy dtype" or dtype.arguments[0] not in ("u1", b"u1"):
        raise ValueError("its pixels are not of the type uint8")
    if shape != (len(labels), 3072) or not isinstance(pixels, bytes) or len(pixels) != 3072 * len(labels):
        raise ValueError(f"it has {len(labels)} labels, and images of another number or size")
    return np.frombuffer(pixels, np.uint8).reshape(shape, order="F" if by_columns else "C"), labels


def _build(content: bytes) -> Any:
    """The value of a pickle, with calls in place of their results."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list:
        begin = marks.pop()
        found = stack[begin:]
        del stack[begin:]
        return found

    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if number > MOST_PARTS:
            raise ValueError(f"it has more than {MOST_PARTS:,} parts")
        name = opcode.name
        if name in VALUES:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in ("BINSTRING", "SHORT_BINSTRING"):
            stack.append(argument.encode("latin-1"))
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            marks.append(len(stack) - int(name[-1]))
            stack.append(tuple(since_mark()))
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = since_mark() if name == "APPENDS" else [stack.pop()]
            stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            if name == "SETITEM":
                marks.append(len(stack) - 2)
            items = since_mark()
            if not all(isinstance(key, bytes | str) for key in items[::2]):
                raise ValueError("it has keys that are no text")
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            if name == "STACK_GLOBAL":
                marks.append(len(stack) - 2)
                argument = " ".join(since_mark())
            if argument not in NAMED:
                raise ValueError(f"it names {argument.replace(' ', '.')}, which the files of CIFAR-10 do not")
            stack.append(Call(argument, (), []))
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            if called.name not in CALLED:
                raise ValueError(f"it calls {called.name.replace(' ', '.')}, which the files of CIFAR-10 do not")
            encode = called.name == "_codecs encode"
            stack.append(arguments[0].encode("latin-1") if encode else Call(called.name, arguments, []))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state.append(state)
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it has {name}, which the files of CIFAR-10 do not")
    raise ValueError("it has no end")
