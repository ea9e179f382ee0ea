"""Named arrays exchanged between the tasks of a fit.

    scratch = Scratch.at(folder)
    scratch.save("tile-3-1", tile)           # atomic
    scratch.load("tile-3-1")                 # memory-mapped in a local folder

A name identifies the content of an array, so a task that runs twice writes the same bytes, and one that died leaves no
partial array. If all tasks run in this process, the arrays are in a dictionary.
"""

from __future__ import annotations

import io
import shutil
from typing import Any

import numpy as np

from kme_dist.data.places import Place
from kme_dist.errors import DataError
from kme_dist.meter import metered


class Scratch:
    """Named arrays in a folder (or object store) that the driver and all workers can reach; in memory without one."""

    def __init__(self, place: Place | None = None) -> None:
        self._place, self._held = place, {}  # type: tuple[Place | None, dict[str, np.ndarray]]

    @classmethod
    def at(cls, path: Any) -> Scratch:
        """In a folder; in the memory of this process if `path` is None."""
        if isinstance(path, Scratch):
            return path
        return cls() if path is None else cls(Place.of(path))

    @property
    def place(self) -> Place:
        if self._place is None:
            raise DataError("this scratch is in memory and has no address; set a scratch folder")
        return self._place

    @property
    def in_memory(self) -> bool:
        return self._place is None

    def child(self, name: str) -> Scratch:
        return Scratch() if self._place is None else Scratch(self._place.child(name))

    def save(self, name: str, array: np.ndarray, *, copy: bool = True) -> None:
        """Without `copy` the caller gives the array away and must not change it afterwards."""
        # In the same order in memory as in a file: products of columns and of rows are rounded differently.
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            array, copy = np.ascontiguousarray(array), False
        if self._place is None:
            self._held[name] = np.array(array) if copy else array
            return
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
        flat = array.reshape(-1, order="A")  # a view of the bytes in memory order
        with metered("write"):
            self._place.write(f"{name}.npy", [header.getvalue(), flat.view(np.uint8).data], sync=False)

    def load(self, name: str) -> np.ndarray:
        if self._place is None:
            return self._held[name]
        if self._place.is_local:
            mapped: np.ndarray = np.load(self._place.path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            return mapped
        read: np.ndarray = np.load(io.BytesIO(self._place.read(f"{name}.npy")), allow_pickle=False)
        return read

    def has(self, name: str) -> bool:
        if self._place is None:
            return name in self._held
        if self._place.is_local:
            return (self._place.path / f"{name}.npy").is_file()
        return bool(self._place.sizes(f"{name}.npy"))

    def delete(self, name: str) -> None:
        if self._place is None:
            self._held.pop(name, None)
        else:
            self._place.delete(f"{name}.npy")

    def bytes(self) -> int:
        if self._place is None:
            return sum(array.nbytes for array in self._held.values())
        return sum(self._place.sizes().values()) if not self._place.is_local or self._place.path.exists() else 0

    def free_bytes(self) -> int:
        """Space in the folder; without a limit in an object store."""
        if self._place is None or not self._place.is_local:
            return 2**63
        folder = self._place.path.absolute()
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def clear(self) -> None:
        if self._place is None:
            self._held.clear()
        else:
            self._place.delete_all()
