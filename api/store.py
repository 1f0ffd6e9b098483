"""Plans that were made, by id."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from meshwright.planner.request import PlanRequest
from meshwright.specs.base import digest_of
from meshwright.specs.document import PlanDocument

#: A document takes up to some hundred kilobytes; 256 stay well below a hundred megabytes.
DEFAULT_CAPACITY = 256


def plan_id(request: PlanRequest, version: str) -> str:
    """The id of a request's answer: the same request to the same version has the same id."""
    digest = digest_of({"request": request.to_json(), "version": version})
    return "plan-" + digest.removeprefix("sha256:")[:24]


class PlanStore:
    """The documents used last, at most ``capacity`` of them. Safe to share between threads."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY):
        self._capacity = capacity
        self._documents: OrderedDict[str, PlanDocument] = OrderedDict()
        self._lock = Lock()

    def get(self, key: str) -> PlanDocument | None:
        """The document of an id, or None."""
        with self._lock:
            document = self._documents.get(key)
            if document is not None:
                self._documents.move_to_end(key)
            return document

    def put(self, key: str, document: PlanDocument) -> None:
        """Keep a document; the one unused longest makes room."""
        with self._lock:
            self._documents[key] = document
            self._documents.move_to_end(key)
            while len(self._documents) > self._capacity:
                self._documents.popitem(last=False)
