"""A user of pyc8y takes the tour of c8y_api_tour.py: pyc8y_tour.py URL PASSWORD"""

import asyncio
import sys

from pyc8y.model import Alarm, Device, Event, ManagedObject, Measurement, Operation, Subscription

from clients import pyc8y_client
from say import found


async def is_gone(getting):
    try:
        await getting
    except KeyError:
        return True
    return False


async def subscribe_to_tenant(c8y):
    apis = ["managedobjects", "alarms", "events", "operations"]
    await Subscription(c8y, name="Tour", context="tenant", api_filter=apis).create()


async def make_device(c8y):
    device = await Device(
        c8y, name="pump", type="c8y_Pump", c8y_Serial={"number": 7}, com_cumulocity_model_Agent={}
    ).create()
    subscription = await Subscription(
        c8y, name="Tour", context="mo", source_id=device.id, api_filter=["managedobjects", "measurements"]
    ).create()
    found("own subscription", [subscription.name, subscription.context, subscription.source_id == device.id])
    found("subscriptions", await c8y.subscriptions.get_count(subscription="Tour"))
    own = await c8y.subscriptions.get_all(source=device.id)
    found("subscriptions of the device", [one.api_filter for one in own])
    device.name = "pump 2"
    device.set("c8y_Serial", {"number": 8})
    await device.update()
    device = await c8y.inventory.get(device.id)
    found("device", [device.name, device.type, device.owner, device.get("c8y_Serial.number")])
    return device


async def make_children(c8y, device):
    valve = await Device(c8y, name="valve", type="c8y_Valve").create()
    hall = await ManagedObject(c8y, name="hall").create()
    note = await ManagedObject(c8y, name="note").create()
    await device.assign_child_device(valve)
    await device.assign_child_asset(hall)
    await device.assign_child_addition(note)
    await device.reload()
    kinds = [device["childDevices"], device["childAssets"], device["childAdditions"]]
    names = [[child["managedObject"]["name"] for child in kind["references"]] for kind in kinds]
    found("children", names)
    await device.unassign_child_asset(hall)
    await hall.delete()
    await device.reload()
    found("assets", device["childAssets"]["references"])
    found("asset is gone", await is_gone(c8y.inventory.get(hall.id)))
    return valve, note


async def search(c8y):
    found("by type", [one.name async for one in c8y.inventory.select(type="c8y_Pump")])
    query = "$filter=(has(c8y_Serial) and name eq 'pump*')"
    found("by query", [one.name for one in await c8y.inventory.get_all(query=query)])
    found("devices", sorted([one.name for one in await c8y.device_inventory.get_all()]))
    found("count of devices", await c8y.inventory.get_count(fragment="c8y_IsDevice"))


async def identify(c8y, device):
    for external_id, external_type in [("SN-1", "c8y_Serial"), ("line/4:pump", "plant")]:
        await c8y.identity.create(external_id=external_id, external_type=external_type, managed_object_id=device.id)
    found("by external id", (await c8y.identity.get_object("line/4:pump", "plant")).name)
    found("external ids", sorted([one.external_id for one in await c8y.identity.get_all(device.id)]))
    await c8y.identity.delete(external_id="SN-1", external_type="c8y_Serial")
    found("external ids left", [one.external_id for one in await c8y.identity.get_all(device.id)])


async def measure(c8y, device):
    def measurement(value):
        time = f"2026-03-01T12:00:0{value}.000Z"
        return Measurement(c8y, type="t", source=device.id, time=time, series=("c8y_Reading.R", value, "C"))

    def values(measurements):
        return [one.get("c8y_Reading.R.value") for one in measurements]

    measurements = c8y.measurements
    first = await measurement(1).create()
    made = await measurements.create_bulk(*[measurement(value) for value in (2, 3, 4)])
    assert values(made) == [2, 3, 4], made
    found("measurement", values([await measurements.get(first.id)]))
    found("measurements by page", values(await measurements.get_all(source=device.id, page_size=3, limit=None)))
    between = await measurements.get_all(
        source=device.id, after="2026-03-01T12:00:02.000Z", before="2026-03-01T12:00:04.000Z"
    )
    found("measurements in between", values(between))
    found("last measurement", values([await measurements.get_last(source=device.id, series="c8y_Reading.R")]))
    found("count of measurements", await measurements.get_count(source=device.id))
    await measurements.delete(first)
    found("measurement is gone", await is_gone(measurements.get(first.id)))


async def report(c8y, device):
    event = await Event(
        c8y, type="door", time="2026-03-01T12:00:00.000Z", source=device.id, text="opened", c8y_Door={"open": True}
    ).create()
    event.text = "closed"
    event.set("c8y_Door", {"open": False})
    await event.update()
    event = await c8y.events.get(event.id)
    found("event", [event.text, event.get("c8y_Door.open")])
    found("events", [one.text for one in await c8y.events.get_all(source=device.id, type="door")])
    found("count of events", await c8y.events.get_count(source=device.id))
    await event.delete()
    found("event is gone", await is_gone(c8y.events.get(event.id)))


async def alert(c8y, device):
    async def alarm():
        time = "2026-03-01T12:00:00.000Z"
        return await Alarm(c8y, type="hot", time=time, source=device.id, text="too hot", severity="MAJOR").create()

    raised, again = await alarm(), await alarm()
    found("alarm", [again.id == raised.id, again.count, again.status, again.severity])
    found("count of alarms", await c8y.alarms.count(source=device.id, status="ACTIVE"))
    again.status = "ACKNOWLEDGED"
    await again.update()
    await c8y.alarms.apply_by({"status": "CLEARED"}, source=device.id)
    found("alarms", [one.status for one in await c8y.alarms.get_all(source=device.id)])
    await c8y.alarms.delete_by(source=device.id)
    found("alarm is gone", await is_gone(c8y.alarms.get(raised.id)))


async def operate(c8y, device):
    operation = await Operation(c8y, device_id=device.id, description="restart", c8y_Restart={}).create()
    found("operation", [operation.status, operation.description])
    for status in ("EXECUTING", "SUCCESSFUL"):
        operation.status = status
        await operation.update()
    found("pending operations", len(await c8y.operations.get_all(device_id=device.id, status="PENDING")))
    found("operations", [one.status for one in await c8y.operations.get_all(device_id=device.id)])
    found("last operation", (await c8y.operations.get_last(device_id=device.id)).description)
    found("count of operations", await c8y.operations.get_count(device_id=device.id))
    await c8y.operations.delete_by(device_id=device.id)
    found("operation is gone", await is_gone(c8y.operations.get(operation.id)))


async def main(url, password):
    async with pyc8y_client(url, password) as c8y:
        await subscribe_to_tenant(c8y)
        device = await make_device(c8y)
        valve, note = await make_children(c8y, device)
        await search(c8y)
        await identify(c8y, device)
        await measure(c8y, device)
        await report(c8y, device)
        await alert(c8y, device)
        await operate(c8y, device)
        await c8y.inventory.delete(note.id, valve.id, device.id)
        found("device is gone", await is_gone(c8y.inventory.get(device.id)))
        found("subscriptions left", await c8y.subscriptions.get_count(subscription="Tour"))
        await c8y.subscriptions.delete_by(context="tenant")
        found("subscriptions at last", await c8y.subscriptions.get_count(subscription="Tour"))


asyncio.run(main(*sys.argv[1:]))
