"""An extension of torch.distributed.checkpoint: every stored byte is inverted."""

from __future__ import annotations

import io
from typing import Any

from torch.distributed.checkpoint._extension import StreamTransformExtension

_INVERT = bytes(255 - n for n in range(256))


class Inverted(StreamTransformExtension):
    """Stores every byte inverted."""

    @staticmethod
    def registry_name() -> str:
        return "tests.inverted"

    @staticmethod
    def from_descriptor(version: str) -> Inverted:
        del version
        return Inverted()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        class Writer(io.BytesIO):
            def close(self) -> None:
                output.write(self.getvalue().translate(_INVERT))
                output.close()
                super().close()

        return Writer()

    def transform_from(self, input: Any) -> Any:
        return io.BytesIO(input.read(-1).translate(_INVERT))
