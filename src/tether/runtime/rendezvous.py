"""The rendezvous of a run's processes: a torch store on this machine. The store itself has no authentication."""

from __future__ import annotations

import hmac
import secrets
import socket
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import TCPStore

TIMEOUT = timedelta(minutes=5)
"""torch's default timeout."""
_SIGNATURE_BYTES = 32


def serve_store(address: str, timeout: timedelta = TIMEOUT) -> TCPStore:
    """Serve a store at one address of this machine, on a free port; by default torch serves all addresses.

    Raises:
        OSError: this machine does not have the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


@dataclass(frozen=True)
class StoreAddress:
    """Address of a store, and the secret with which its clients sign values."""

    host: str
    port: int
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def connect(self) -> TCPStore:
        """Return a client of the store."""
        return TCPStore(self.host, self.port, is_master=False, wait_for_workers=False)

    def signed(self, key: str, value: bytes) -> bytes:
        """Return a value with a signature that is only valid for this key."""
        return self._signature(key, value) + value

    def verified(self, key: str, signed: bytes) -> bytes | None:
        """Return the value signed for a key; None if the signature is invalid."""
        signature, value = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        return value if hmac.compare_digest(signature, self._signature(key, value)) else None

    def _signature(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self.secret, key.encode() + b"\0" + value, "sha256")
