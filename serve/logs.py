"""The server's log: one JSON object a line, on stderr."""

import json
import logging
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """{"time", "level", "logger", "message"}, with the fields that a record brings as `extra={"fields": {...}}`, and a
    traceback as "exception"."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **record.__dict__.get("fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr() -> None:
    """For the whole process."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
