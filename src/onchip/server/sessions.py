"""Which replica a request goes to. Ray's proxy loads this file, so it imports nothing large."""

import hashlib
import random

from ray.serve.request_router import RequestRouter


def rank(session: str, replica: str) -> bytes:
    """A session is with the replica of least rank: where one comes or goes, only its own sessions move."""
    return hashlib.blake2b(f"{session} {replica}".encode()).digest()


class BySession(RequestRouter):
    """Requests that name their session go where those before went, as long as there is room; others to the less busy of two."""

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        if pending_request is not None and (session := pending_request.metadata.session_id):
            return [[one] for one in sorted(candidate_replicas, key=lambda one: rank(session, one.replica_id.unique_id))]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
