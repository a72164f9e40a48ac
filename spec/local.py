"""A server of its own for `spec chat`: an engine in this process, reached over loopback as any other server is."""

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serve.description import Description
from serve.engine import Engine
from serve.server import DrainingServer, bind, make_service
from serve.service import Settings
from target_model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Address:
    url: str
    api_key: str


@contextmanager
def local_server(engine: Engine, tokenizer: Tokenizer, description: Description) -> Iterator[Address]:
    """Serves until the block ends, to whoever has the key, which is drawn here."""
    key = secrets.token_hex(16)
    service = make_service(engine, tokenizer, description, settings=Settings(api_keys=(key,), drain_timeout=0))
    listener = bind("127.0.0.1", 0)
    server = DrainingServer(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield Address(f"http://127.0.0.1:{listener.getsockname()[1]}", key)
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
