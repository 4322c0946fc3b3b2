"""Subscribes with c8y_api and listens, as listen.py says: c8y_api_line.py URL PASSWORD DEVICE"""

import asyncio
import sys

from c8y_api.model import Subscription

from clients import c8y_api_client
from listen import main as listen


def main(url, password, device):
    Subscription(
        c8y_api_client(url, password),
        name="PyLine",
        context="mo",
        source_id=device,
        api_filter=["measurements"],
        type_filter="'temperature' or 'pressure'",
        fragments=["c8y_Reading"],
    ).create()
    asyncio.run(listen("c8y_api", url, password, "PyLine", "pyConsumer", "exclusive"))


main(*sys.argv[1:])
