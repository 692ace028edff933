"""A process group as a module keeps it: shared by copies, and pickled by name."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup

from lowp.torch_compat import process_group


class GroupHandle:
    """Holds a process group, which itself can be neither copied nor pickled.

    A copy shares the group. An unpickled handle looks the group up by its name, which must exist by then.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupHandle:
        return GroupHandle(self.group)

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle, (None if self.group is None else self.group.group_name,)


def _handle(name: str | None) -> GroupHandle:
    return GroupHandle(None if name is None else process_group(name))
