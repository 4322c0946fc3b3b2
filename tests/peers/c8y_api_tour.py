"""A user of c8y_api ingests and reads back: c8y_api_tour.py URL PASSWORD

The scripts of the other clients take the same tour.
"""

import sys

from c8y_api.model import Alarm, Device, Event, ManagedObject, Measurement, Operation, Subscription

from clients import c8y_api_client
from say import found


def is_gone(get):
    try:
        get()
    except KeyError:
        return True
    return False


def subscribe_to_tenant(c8y):
    # The client cannot parse subscriptions that have no source, and so must not ask for them.
    apis = ["managedobjects", "alarms", "events", "operations"]
    c8y.notification2_subscriptions.create(Subscription(name="Tour", context="tenant", api_filter=apis))


def make_device(c8y):
    device = Device(c8y, name="pump", type="c8y_Pump", c8y_Serial={"number": 7}, com_cumulocity_model_Agent={}).create()
    subscription = Subscription(
        c8y, name="Tour", context="mo", source_id=device.id, api_filter=["managedobjects", "measurements"]
    ).create()
    found("own subscription", [subscription.name, subscription.context, subscription.source_id == device.id])
    subscriptions = c8y.notification2_subscriptions
    found("subscriptions", subscriptions.get_count(subscription="Tour"))
    found("subscriptions of the device", [one.api_filter for one in subscriptions.get_all(source=device.id)])
    device.name = "pump 2"
    device.c8y_Serial.number = 8
    device.update()
    device = c8y.inventory.get(device.id)
    found("device", [device.name, device.type, device.owner, device.c8y_Serial.number])
    return device


def make_children(c8y, device):
    valve = Device(c8y, name="valve", type="c8y_Valve").create()
    hall = ManagedObject(c8y, name="hall").create()
    note = ManagedObject(c8y, name="note").create()
    device.add_child_device(valve)
    device.add_child_asset(hall)
    device.add_child_addition(note)
    device = c8y.inventory.get(device.id)
    kinds = [device.child_devices, device.child_assets, device.child_additions]
    found("children", [[child.name for child in kind] for kind in kinds])
    device.unassign_child_asset(hall)
    hall.delete()
    found("assets", [child.name for child in c8y.inventory.get(device.id).child_assets])
    found("asset is gone", is_gone(lambda: c8y.inventory.get(hall.id)))
    return valve, note


def search(c8y):
    found("by type", [one.name for one in c8y.inventory.get_all(type="c8y_Pump")])
    found("by query", [one.name for one in c8y.inventory.get_all(query="$filter=(has(c8y_Serial) and name eq 'pump*')")])
    found("devices", sorted(one.name for one in c8y.device_inventory.get_all()))
    found("count of devices", c8y.inventory.get_count(fragment="c8y_IsDevice"))


def identify(c8y, device):
    c8y.identity.create("SN-1", "c8y_Serial", device.id)
    c8y.identity.create("line/4:pump", "plant", device.id)
    found("by external id", c8y.identity.get_object("line/4:pump", "plant").name)
    found("external ids", sorted(one.external_id for one in c8y.identity.get_all(device.id)))
    c8y.identity.delete("SN-1", "c8y_Serial")
    found("external ids left", [one.external_id for one in c8y.identity.get_all(device.id)])


def measure(c8y, device):
    def measurement(value):
        reading = {"R": {"value": value, "unit": "C"}}
        time = f"2026-03-01T12:00:0{value}.000Z"
        return Measurement(c8y, type="t", source=device.id, time=time, c8y_Reading=reading)

    def values(measurements):
        return [one.c8y_Reading.R.value for one in measurements]

    first = measurement(1).create()
    c8y.measurements.create(*[measurement(value) for value in (2, 3, 4)])
    found("measurement", values([c8y.measurements.get(first.id)]))
    found("measurements by page", values(c8y.measurements.get_all(source=device.id, page_size=3)))
    found("measurements in between", values(c8y.measurements.get_all(
        source=device.id, after="2026-03-01T12:00:02.000Z", before="2026-03-01T12:00:04.000Z")))
    found("last measurement", values([c8y.measurements.get_last(source=device.id, series="c8y_Reading.R")]))
    found("count of measurements", c8y.measurements.get_count(source=device.id))
    c8y.measurements.delete(first.id)
    found("measurement is gone", is_gone(lambda: c8y.measurements.get(first.id)))


def report(c8y, device):
    event = Event(
        c8y, type="door", time="2026-03-01T12:00:00.000Z", source=device.id, text="opened", c8y_Door={"open": True}
    ).create()
    event.text = "closed"
    event.c8y_Door.open = False
    event.update()
    event = c8y.events.get(event.id)
    found("event", [event.text, event.c8y_Door.open])
    found("events", [one.text for one in c8y.events.get_all(source=device.id, type="door")])
    found("count of events", c8y.events.get_count(source=device.id))
    c8y.events.delete(event.id)
    found("event is gone", is_gone(lambda: c8y.events.get(event.id)))


def alert(c8y, device):
    def alarm():
        return Alarm(c8y, type="hot", time="2026-03-01T12:00:00.000Z", source=device.id, text="too hot", severity="MAJOR")

    raised = alarm().create()
    again = alarm().create()
    found("alarm", [again.id == raised.id, again.count, again.status, again.severity])
    found("count of alarms", c8y.alarms.count(source=device.id, status="ACTIVE"))
    again.status = "ACKNOWLEDGED"
    again.update()
    c8y.alarms.apply_to({"status": "CLEARED"}, raised.id)
    found("alarms", [one.status for one in c8y.alarms.get_all(source=device.id)])
    c8y.alarms.delete_by(source=device.id)
    found("alarm is gone", is_gone(lambda: c8y.alarms.get(raised.id)))


def operate(c8y, device):
    operation = Operation(c8y, device_id=device.id, description="restart", c8y_Restart={}).create()
    found("operation", [operation.status, operation.description])
    for status in ("EXECUTING", "SUCCESSFUL"):
        operation.status = status
        operation.update()
    found("pending operations", len(c8y.operations.get_all(device_id=device.id, status="PENDING")))
    found("operations", [one.status for one in c8y.operations.get_all(device_id=device.id)])
    found("last operation", c8y.operations.get_last(device_id=device.id).description)
    found("count of operations", c8y.operations.get_count(device_id=device.id))
    c8y.operations.delete_by(device_id=device.id)
    found("operation is gone", is_gone(lambda: c8y.operations.get(operation.id)))


def main(url, password):
    c8y = c8y_api_client(url, password)
    subscribe_to_tenant(c8y)
    device = make_device(c8y)
    valve, note = make_children(c8y, device)
    search(c8y)
    identify(c8y, device)
    measure(c8y, device)
    report(c8y, device)
    alert(c8y, device)
    operate(c8y, device)
    c8y.inventory.delete(note.id, valve.id, device.id)
    found("device is gone", is_gone(lambda: c8y.inventory.get(device.id)))
    found("subscriptions left", c8y.notification2_subscriptions.get_count(subscription="Tour"))
    c8y.notification2_subscriptions.delete_by(context="tenant")
    found("subscriptions at last", c8y.notification2_subscriptions.get_count(subscription="Tour"))


main(*sys.argv[1:])
