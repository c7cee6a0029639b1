"""AdminService on the wire: who may call it, and translation."""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from noria.reasons import RequestError, invalid_field
from noria.service import errors
from noria.v1 import admin_pb2, admin_pb2_grpc
from router import wire_admin
from router.calls import Calls, Context
from router.fleet import Fleet
from router.key_admin import KeyAdmin
from router.store.keys import WallClock

T = TypeVar("T")

SERVICE_NAME = "noria.v1.AdminService"
_DEFAULT_CHANGES, _MAX_CHANGES = 100, 1000


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Answers operators."""

    def __init__(
        self, keys: KeyAdmin, fleet: Fleet, calls: Calls, wall_clock: WallClock = time.time
    ) -> None:
        self._keys = keys
        self._fleet = fleet
        self._calls = calls
        self._wall_clock = wall_clock

    async def SetTenant(  # noqa: N802 - the wire's name
        self, request: admin_pb2.SetTenantRequest, context: Context
    ) -> admin_pb2.SetTenantResponse:
        async def set_tenant(by: str) -> admin_pb2.SetTenantResponse:
            await self._keys.set_tenant(wire_admin.checked_tenant(request), by)
            return admin_pb2.SetTenantResponse()

        return await self._answer("SetTenant", context, set_tenant)

    async def CreateKey(  # noqa: N802 - the wire's name
        self, request: admin_pb2.CreateKeyRequest, context: Context
    ) -> admin_pb2.CreateKeyResponse:
        async def create(by: str) -> admin_pb2.CreateKeyResponse:
            label = wire_admin.checked_label(request.label)
            ends_in_s = wire_admin.checked_expiry(request)
            name = wire_admin.checked_certificate(request.certificate)
            if name:
                label = label or name
                made = await self._keys.certify(request.tenant, name, label, ends_in_s, by)
            else:
                made = await self._keys.create(request.tenant, label, ends_in_s, by)
            return admin_pb2.CreateKeyResponse(
                key=wire_admin.key(made.record, self._wall_clock()),
                api_key=made.api_key,
                until_router_stops=not made.is_lasting,
            )

        return await self._answer("CreateKey", context, create)

    async def ListKeys(  # noqa: N802 - the wire's name
        self, request: admin_pb2.ListKeysRequest, context: Context
    ) -> admin_pb2.ListKeysResponse:
        async def list_keys(by: str) -> admin_pb2.ListKeysResponse:
            known = await self._keys.known(request.tenant, include_void=request.include_void)
            now = self._wall_clock()
            return admin_pb2.ListKeysResponse(
                tenants=map(wire_admin.tenant, known.tenants),
                keys=[wire_admin.key(record, now) for record in known.keys],
            )

        return await self._answer("ListKeys", context, list_keys)

    async def RevokeKey(  # noqa: N802 - the wire's name
        self, request: admin_pb2.RevokeKeyRequest, context: Context
    ) -> admin_pb2.RevokeKeyResponse:
        async def revoke(by: str) -> admin_pb2.RevokeKeyResponse:
            record = await self._keys.revoke(request.key_id, by)
            return admin_pb2.RevokeKeyResponse(key=wire_admin.key(record, self._wall_clock()))

        return await self._answer("RevokeKey", context, revoke)

    async def ExpireKey(  # noqa: N802 - the wire's name
        self, request: admin_pb2.ExpireKeyRequest, context: Context
    ) -> admin_pb2.ExpireKeyResponse:
        async def expire(by: str) -> admin_pb2.ExpireKeyResponse:
            in_s = wire_admin.checked_expiry(request)
            record = await self._keys.expire(request.key_id, in_s, by)
            return admin_pb2.ExpireKeyResponse(key=wire_admin.key(record, self._wall_clock()))

        return await self._answer("ExpireKey", context, expire)

    async def ListKeyChanges(  # noqa: N802 - the wire's name
        self, request: admin_pb2.ListKeyChangesRequest, context: Context
    ) -> admin_pb2.ListKeyChangesResponse:
        async def list_changes(by: str) -> admin_pb2.ListKeyChangesResponse:
            limit = request.limit if request.HasField("limit") else _DEFAULT_CHANGES
            if not 1 <= limit <= _MAX_CHANGES:
                raise invalid_field("limit", f"{limit}; from 1 to {_MAX_CHANGES}")
            changes = await self._keys.changes(limit)
            return admin_pb2.ListKeyChangesResponse(changes=map(wire_admin.key_change, changes))

        return await self._answer("ListKeyChanges", context, list_changes)

    async def GetFleet(  # noqa: N802 - the wire's name
        self, request: admin_pb2.GetFleetRequest, context: Context
    ) -> admin_pb2.GetFleetResponse:
        async def status(by: str) -> admin_pb2.GetFleetResponse:
            return self._fleet.status()

        return await self._answer("GetFleet", context, status)

    async def ListRequests(  # noqa: N802 - the wire's name
        self, request: admin_pb2.ListRequestsRequest, context: Context
    ) -> admin_pb2.ListRequestsResponse:
        async def list_requests(by: str) -> admin_pb2.ListRequestsResponse:
            return self._fleet.requests(request)

        return await self._answer("ListRequests", context, list_requests)

    async def DrainWorker(  # noqa: N802 - the wire's name
        self, request: admin_pb2.DrainWorkerRequest, context: Context
    ) -> admin_pb2.DrainWorkerResponse:
        async def drain(by: str) -> admin_pb2.DrainWorkerResponse:
            return await self._fleet.drain(request.worker_id, draining=not request.undo, by=by)

        return await self._answer("DrainWorker", context, drain)

    async def _answer(
        self, method: str, context: Context, answer: Callable[[str], Awaitable[T]]
    ) -> T:
        """What is answered to the key of this id; an error becomes its status."""
        try:
            key = await self._calls.authenticate_admin(method, context)
            return await answer(key.key_id)
        except RequestError as error:
            await errors.abort(context, error)
