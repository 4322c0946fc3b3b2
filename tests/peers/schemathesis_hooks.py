"""How schemathesis sends plugins, and what it must not do to the gateway that it asks: change the password with which it asks."""

import schemathesis

schemathesis.serializer.alias("application/wasm", "application/octet-stream")
schemathesis.serializer.alias("text/javascript", "text/plain")


@schemathesis.hook
def before_call(context, case, kwargs):
    body = case.body
    if case.operation.path.startswith("/user/") and case.method == "PUT" and isinstance(body, dict):
        password = body.get("password")
        if isinstance(password, str) and len(password) >= 8:
            case.body = {name: value for name, value in body.items() if name != "password"}
