"""Drives c8y_api's own listener: c8y_api_line.py BASE_URL PASSWORD DEVICE

Prints one JSON object a line: {"event": "connected"} after each connection, {"event": "message", ...} for each message.
SIGTERM stops the listener, which unsubscribes, and ends the script with 0.
"""

import asyncio
import json
import signal
import sys

import requests
from c8y_api import CumulocityApi
from c8y_api.model import Subscription
from c8y_tk.notification2 import AsyncListener


def say(event, **members):
    print(json.dumps({"event": event, **members}), flush=True)


async def report_connections(listener):
    """The listener reconnects without telling anybody."""
    while True:
        await listener._is_connected.wait()
        say("connected")
        while listener._is_connected.is_set():
            await asyncio.sleep(0.02)


async def received(message):
    say("message", source=message.source, action=message.action, body=message.json)


async def main(base_url, password, device):
    c8y = CumulocityApi(base_url=base_url, tenant_id="edge", username="admin", password=password)
    Subscription(
        c8y,
        name="PyLine",
        context="mo",
        source_id=device,
        api_filter=["measurements"],
        type_filter="'temperature' or 'pressure'",
        fragments=["c8y_Reading"],
    ).create()

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    while not stopped.is_set():
        listener = AsyncListener(c8y, subscription_name="PyLine", subscriber_name="pyConsumer")
        reports = asyncio.create_task(report_connections(listener))
        listening = listener.start(received)
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait([listening, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listener.stop()
        try:
            await listening
        except (requests.exceptions.ConnectionError, OSError):
            # The client gives up when it cannot ask for a token, as while the gateway restarts: its users start it again.
            await asyncio.sleep(0.1)
        reports.cancel()
        stopping.cancel()


asyncio.run(main(*sys.argv[1:]))
