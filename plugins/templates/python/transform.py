"""Adds a member `site` to the bodies. Settings: {"site": "Lyon"}."""

import json

from componentize_py_types import Err, Ok
from wit_world import exports
from wit_world.exports.transforming import Interest, NewBody_Text
from wit_world.imports.types import BodyForm, MetaFields, State

# Every call has an object of its own: what outlives it stands here.
site = None


class Transforming(exports.Transforming):
    def configure(self, settings):
        global site
        try:
            site = str(json.loads(settings)["site"])
        except (ValueError, TypeError, KeyError):
            raise Err('settings must be like {"site": "Lyon"}')
        # Say what you read, and no more: what isn't handed over costs nothing.
        return Interest(MetaFields(0), BodyForm.TEXT, State.NONE)

    def apply(self, batch):
        return [new_body(message) for message in batch]


def new_body(message):
    try:
        body = json.loads(message.body.value)
        body["site"] = site
        return Ok(NewBody_Text(json.dumps(body, ensure_ascii=False, separators=(",", ":"))))
    except (ValueError, TypeError) as error:
        # A fault of this message alone; what is not caught costs the instance.
        return Err(str(error))
