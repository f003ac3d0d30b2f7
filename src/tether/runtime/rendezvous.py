"""Where processes of a run meet: a store of torch on this machine, which asks nobody who he is."""

from __future__ import annotations

import hmac
import secrets
import socket
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import TCPStore

TIMEOUT = timedelta(minutes=5)
"""The default of torch."""
_SIGNATURE_BYTES = 32


def serve_store(address: str, timeout: timedelta = TIMEOUT) -> TCPStore:
    """Serve a store at one address of this machine, on a free port; torch by itself would listen at all of them.

    Raises:
        OSError: it is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


@dataclass(frozen=True)
class StoreAddress:
    """Where a store is served, and the secret that its clients sign values with."""

    host: str
    port: int
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def connect(self) -> TCPStore:
        """Return a client of the store."""
        return TCPStore(self.host, self.port, is_master=False, wait_for_workers=False)

    def signed(self, key: str, value: bytes) -> bytes:
        """Return a value with a signature, which is good for this key alone."""
        return self._signature(key, value) + value

    def verified(self, key: str, signed: bytes) -> bytes | None:
        """Return the value that was signed for a key; None where anybody else wrote it."""
        signature, value = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        return value if hmac.compare_digest(signature, self._signature(key, value)) else None

    def _signature(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self.secret, key.encode() + b"\0" + value, "sha256")
