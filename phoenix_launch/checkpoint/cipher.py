"""TLS between checkpoint servers, for --encrypt: who listens on the network learns nothing. Who is who is proved elsewhere.

TLS wants a certificate of the side that is called. The one here lies in the package, its key with it, and proves nothing:
nobody looks at it. The keys of a connection come from a fresh Diffie-Hellman exchange, so that they are known to the two ends
alone, and both ends prove that they know the job's key over what is unique to this very connection (RFC 5929's
tls-unique): whoever sits between two ends has two connections, and proves nothing over the other one's. TLS 1.2, as
tls-unique is not defined for 1.3, without renegotiation and without resumption.
"""

from __future__ import annotations

import functools
import socket
import ssl
from pathlib import Path
from typing import Final

from phoenix_launch.errors import ProtocolError

_CERTIFICATE: Final = Path(__file__).with_name("throwaway.pem")
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"


@functools.cache
def _context(calling: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if calling else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    if calling:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_cert_chain(_CERTIFICATE)
    return context


def wrapped(sock: socket.socket, *, calling: bool, seconds: float) -> tuple[ssl.SSLSocket, bytes]:
    """The connection, enciphered, and what is unique to it. `sock` is not to be used any more.

    Raises OSError, or ProtocolError when the other end does not speak TLS.
    """
    sock.settimeout(seconds)
    try:
        made = _context(calling).wrap_socket(sock, server_side=not calling, suppress_ragged_eofs=False)
    except ssl.SSLError as error:
        raise ProtocolError(f"the other end of an encrypted connection does not speak TLS: {error.reason}") from None
    binding = made.get_channel_binding("tls-unique")
    if not binding:
        made.close()
        raise ProtocolError("an encrypted connection has nothing that is unique to it")
    return made, binding
