"""The clients, as the administrator of the gateway at `url`; `SSL_CERT_FILE` names an authority that is trusted besides."""

import os
import ssl


def c8y_api_client(url, password):
    from c8y_api import CumulocityApi

    return CumulocityApi(base_url=url, tenant_id="edge", username="admin", password=password)


def pyc8y_client(url, password):
    import aiohttp
    from pyc8y import CumulocityClient
    from pyc8y.auth import BasicAuth

    async def connector():
        return aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"]))

    factory = connector if url.startswith("https") else None
    return CumulocityClient(url, "edge", BasicAuth("edge/admin", password), connector_factory=factory)
