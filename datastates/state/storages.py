"""torch's storages, the memory of tensors, where a state holds a storage itself."""

from __future__ import annotations

from typing import Any

from datastates._base.loaded import loaded
from datastates.errors import ProviderError
from datastates.state import dtensors


def is_storage(value: object) -> bool:
    """Whether a value is a torch storage, typed or untyped."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, (torch.TypedStorage, torch.UntypedStorage))


def bytes_of(storage: Any) -> Any:
    """View the memory of a storage as a tensor of bytes, without a copy."""
    torch = loaded("torch")
    memory = getattr(storage, "_untyped_storage", storage)
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def address(tensor: Any) -> int:
    """Address at which the storage of a tensor begins; of a DTensor, of its local tensor."""
    return int(dtensors.local(tensor).untyped_storage().data_ptr())


def class_of(storage: Any) -> str:
    """The name of a storage's class in a file of ``torch.save``.

    Raises:
        ProviderError: No class of storages in a file of ``torch.save`` has the storage's element type.
    """
    torch = loaded("torch")
    if isinstance(storage, torch.UntypedStorage):
        return "UntypedStorage"
    found = torch.storage._dtype_to_storage_type_map().get(storage.dtype)
    if found is None:
        raise ProviderError(f"a storage of {storage.dtype} cannot be saved: save a tensor of it, or storage.untyped()")
    return str(found)
