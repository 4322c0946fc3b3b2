// A user of @c8y/client takes the tour of c8y_api_tour.py: c8y_client_tour.js URL PASSWORD, with NODE_PATH.
'use strict';

const { Client } = require('@c8y/client');

function found(what, value) {
  console.log(JSON.stringify({ event: 'found', what, value }));
}

async function isGone(getting) {
  try {
    await getting;
  } catch ({ res }) {
    return res.status === 404;
  }
  return false;
}

// The client has no calls of its own for subscriptions.
async function subscriptions(client, method, params, body) {
  const headers = { accept: 'application/json', 'content-type': 'application/json' };
  const options = { method, params, headers, body: body && JSON.stringify(body) };
  const res = await client.core.fetch('/notification2/subscriptions', options);
  if (!res.ok) throw new Error(`${method}: ${res.status} ${await res.text()}`);
  return res.status === 204 ? null : res.json();
}

async function countOfSubscriptions(client) {
  const page = await subscriptions(client, 'GET', { subscription: 'Tour', pageSize: 1, withTotalPages: true });
  return page.statistics.totalPages;
}

async function subscribe(client, context, apis, source) {
  const subscription = { context, source, subscription: 'Tour', subscriptionFilter: { apis } };
  return subscriptions(client, 'POST', {}, subscription);
}

async function makeDevice(client) {
  const { data: device } = await client.inventory.create({
    name: 'pump', type: 'c8y_Pump', c8y_Serial: { number: 7 }, c8y_IsDevice: {}, com_cumulocity_model_Agent: {},
  });
  const own = await subscribe(client, 'mo', ['managedobjects', 'measurements'], { id: device.id });
  found('own subscription', [own.subscription, own.context, own.source.id === device.id]);
  found('subscriptions', await countOfSubscriptions(client));
  const page = await subscriptions(client, 'GET', { source: device.id });
  found('subscriptions of the device', page.subscriptions.map(one => one.subscriptionFilter.apis));
  await client.inventory.update({ id: device.id, name: 'pump 2', c8y_Serial: { number: 8 } });
  const { data: changed } = await client.inventory.detail(device);
  found('device', [changed.name, changed.type, changed.owner, changed.c8y_Serial.number]);
  return changed;
}

async function makeChildren(client, device) {
  const { data: valve } = await client.inventory.childDevicesCreate(
    { name: 'valve', type: 'c8y_Valve', c8y_IsDevice: {} }, device);
  const { data: hall } = await client.inventory.create({ name: 'hall' });
  const { data: note } = await client.inventory.create({ name: 'note' });
  const { data: added } = await client.inventory.childAssetsAdd(hall, device);
  const { data: all } = await client.inventory.childAdditionsBulkAdd([note], device);
  if (added.id !== hall.id || all[0].id !== note.id) throw new Error('other children were added');
  const names = list => list.data.map(child => child.name);
  found('children', [
    names(await client.inventory.childDevicesList(device)),
    names(await client.inventory.childAssetsList(device, { pageSize: 10, withTotalPages: true })),
    names(await client.inventory.childAdditionsList(device)),
  ]);
  await client.inventory.childAssetsRemove(hall, device);
  await client.inventory.delete(hall);
  found('assets', names(await client.inventory.childAssetsList(device)));
  found('asset is gone', await isGone(client.inventory.detail(hall)));
  return [valve, note];
}

async function search(client) {
  const names = list => list.data.map(one => one.name);
  found('by type', names(await client.inventory.list({ type: 'c8y_Pump' })));
  const query = { __and: [{ __has: 'c8y_Serial' }, { name: 'pump*' }] };
  found('by query', names(await client.inventory.listQuery(query)));
  found('devices', names(await client.inventory.listQueryDevices({})).sort());
  found('count of devices', (await client.inventory.count({ fragmentType: 'c8y_IsDevice' })).data);
}

async function identify(client, device) {
  for (const [externalId, type] of [['SN-1', 'c8y_Serial'], ['line/4:pump', 'plant']]) {
    await client.identity.create({ externalId, type, managedObject: { id: device.id } });
  }
  const { data: identity } = await client.identity.detail({ externalId: 'line/4:pump', type: 'plant' });
  found('by external id', (await client.inventory.detail(identity.managedObject)).data.name);
  const ids = async () => (await client.identity.list(device.id)).data.map(one => one.externalId).sort();
  found('external ids', await ids());
  await client.identity.delete({ externalId: 'SN-1', type: 'c8y_Serial' });
  found('external ids left', await ids());
}

async function measure(client, device) {
  const measurement = value => client.measurement.create({
    type: 't', sourceId: device.id, time: `2026-03-01T12:00:0${value}.000Z`, c8y_Reading: { R: { value, unit: 'C' } },
  });
  const values = list => list.data.map(one => one.c8y_Reading.R.value);
  const { data: first } = await measurement(1);
  for (const value of [2, 3, 4]) await measurement(value);
  found('measurement', values({ data: [(await client.measurement.detail(first)).data] }));
  const source = device.id;
  const page = await client.measurement.list({ source, pageSize: 3 });
  const next = await page.paging.next();
  const past = await client.measurement.list({ source, pageSize: 3, currentPage: 3 });
  if (past.data.length !== 0) throw new Error('there is a third page');
  found('measurements by page', [...values(page), ...values(next)]);
  const dateFrom = '2026-03-01T12:00:02.000Z';
  found('measurements in between', values(
    await client.measurement.list({ source, dateFrom, dateTo: '2026-03-01T12:00:04.000Z' })));
  const newest = { source, dateFrom: '1970-01-01T00:00:00Z', revert: true, pageSize: 1,
    valueFragmentType: 'c8y_Reading', valueFragmentSeries: 'R' };
  found('last measurement', values(await client.measurement.list(newest)));
  found('count of measurements', (await client.measurement.list(
    { source, pageSize: 1, withTotalPages: true })).paging.totalPages);
  await client.measurement.delete(first);
  found('measurement is gone', await isGone(client.measurement.detail(first)));
}

async function report(client, device) {
  const { data: made } = await client.event.create({
    type: 'door', time: '2026-03-01T12:00:00.000Z', source: { id: device.id }, text: 'opened', c8y_Door: { open: true },
  });
  await client.event.update({ id: made.id, text: 'closed', c8y_Door: { open: false } });
  const { data: event } = await client.event.detail(made);
  found('event', [event.text, event.c8y_Door.open]);
  const list = await client.event.list({ source: device.id, type: 'door', withTotalPages: true, pageSize: 1 });
  found('events', list.data.map(one => one.text));
  found('count of events', list.paging.totalPages);
  await client.event.delete(event);
  found('event is gone', await isGone(client.event.detail(event)));
}

async function alert(client, device) {
  const alarm = () => client.alarm.create({
    type: 'hot', time: '2026-03-01T12:00:00.000Z', source: { id: device.id }, text: 'too hot', severity: 'MAJOR',
  });
  const { data: raised } = await alarm();
  const { data: again } = await alarm();
  found('alarm', [again.id === raised.id, again.count, again.status, again.severity]);
  found('count of alarms', (await client.alarm.count({ source: device.id, status: 'ACTIVE' })).data);
  await client.alarm.update({ id: raised.id, status: 'ACKNOWLEDGED' });
  await client.alarm.updateBulk({ status: 'CLEARED' }, { source: device.id });
  found('alarms', (await client.alarm.list({ source: device.id })).data.map(one => one.status));
  const res = await client.core.fetch('/alarm/alarms', { method: 'DELETE', params: { source: device.id } });
  if (res.status !== 204) throw new Error(`alarms: ${res.status}`);
  found('alarm is gone', await isGone(client.alarm.detail(raised)));
}

async function operate(client, device) {
  const { data: operation } = await client.operation.create({
    deviceId: device.id, description: 'restart', c8y_Restart: {},
  });
  found('operation', [operation.status, operation.description]);
  for (const status of ['EXECUTING', 'SUCCESSFUL']) await client.operation.update({ id: operation.id, status });
  const list = async filter => (await client.operation.list({ deviceId: device.id, ...filter })).data;
  found('pending operations', (await list({ status: 'PENDING' })).length);
  found('operations', (await list({})).map(one => one.status));
  const [last] = await list({ dateFrom: '1970-01-01T00:00:00Z', revert: true, pageSize: 1 });
  found('last operation', last.description);
  const counted = { deviceId: device.id, pageSize: 1, withTotalPages: true };
  found('count of operations', (await client.operation.list(counted)).paging.totalPages);
  const params = { deviceId: device.id };
  const res = await client.core.fetch('/devicecontrol/operations', { method: 'DELETE', params });
  if (res.status !== 204) throw new Error(`operations: ${res.status}`);
  found('operation is gone', await isGone(client.operation.detail(operation)));
}

async function main(url, password) {
  const client = await Client.authenticate({ tenant: 'edge', user: 'admin', password }, url);
  if (client.core.tenant !== 'edge') throw new Error(`tenant ${client.core.tenant}`);
  await subscribe(client, 'tenant', ['managedobjects', 'alarms', 'events', 'operations']);
  const device = await makeDevice(client);
  const [valve, note] = await makeChildren(client, device);
  await search(client);
  await identify(client, device);
  await measure(client, device);
  await report(client, device);
  await alert(client, device);
  await operate(client, device);
  for (const one of [note, valve, device]) await client.inventory.delete(one);
  found('device is gone', await isGone(client.inventory.detail(device)));
  found('subscriptions left', await countOfSubscriptions(client));
  await subscriptions(client, 'DELETE', { context: 'tenant' });
  found('subscriptions at last', await countOfSubscriptions(client));
}

main(...process.argv.slice(2)).catch(error => {
  console.error(error.res ? `${error.res.url}: ${error.res.status} ${JSON.stringify(error.data)}` : error);
  process.exit(1);
});
