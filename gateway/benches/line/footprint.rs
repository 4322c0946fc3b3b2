//! What the gateway weighs and how quickly it is there: memory, starts, the binary, a restart with a backlog.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::Plan;
use crate::consumer::Socket;
use crate::gateway::Gateway;
use crate::load::Load;
use crate::measurement::{Request, SendTimes, type_filter};
use crate::report::{Report, Row, Target, note};
use crate::scene::Scene;
use crate::stats::median;

const IDLE: Duration = Duration::from_secs(2);
const BULK: usize = 1_000;
const FILLED_WITHIN: Duration = Duration::from_secs(600);
const FIRST_FRAME_WITHIN: Duration = Duration::from_secs(60);

pub(crate) fn measure(plan: &Plan, report: &mut Report) -> Result<()> {
    let binary = std::fs::metadata(crate::binary())?.len() as f64 / 1e6;
    report.add(Row {
        figure: "binary".into(),
        measured: format!("{binary:.1} MB"),
        target: Some(Target::at_most(binary, 30.0, " MB")),
        ..Row::default()
    });
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    starts(plan, folder.path(), report)?;
    backlog(plan, &folder.path().join("backlog"), report)
}

/// Starts on empty directories, then again on one in which a plugin has been used.
fn starts(plan: &Plan, folder: &Path, report: &mut Report) -> Result<()> {
    note("footprint: starts");
    let used = folder.join("0");
    let mut cold = vec![first_start(plan, &used, report)?];
    for number in 1..plan.starts {
        cold.push(start(&folder.join(number.to_string()))?);
    }
    report.add(Row {
        figure: "start to ready, cold".into(),
        measured: format!("{:.1} ms", median(cold)),
        ..Row::default()
    });
    let warm = (0..plan.starts).map(|_| start(&used)).collect::<Result<Vec<f64>>>()?;
    let warm = median(warm);
    report.add(Row {
        figure: "start to ready, warm".into(),
        measured: format!("{warm:.1} ms"),
        target: Some(Target::at_most(warm, 100.0, " ms")),
        ..Row::default()
    });
    let gateway = Gateway::start(&used)?;
    idle(&gateway, "RSS idle, warm", report)?;
    gateway.stop()
}

/// The milliseconds to ready on an empty directory, in which it leaves a subscription with a plugin.
fn first_start(plan: &Plan, data: &Path, report: &mut Report) -> Result<f64> {
    let gateway = Gateway::start(data)?;
    let ready = gateway.ready_after;
    idle(&gateway, "RSS idle, cold", report)?;
    Scene::set_up(gateway.http, plan.devices, Some(&type_filter()))?;
    gateway.stop()?;
    Ok(milliseconds(ready))
}

fn start(data: &Path) -> Result<f64> {
    let gateway = Gateway::start(data)?;
    let ready = gateway.ready_after;
    gateway.stop()?;
    Ok(milliseconds(ready))
}

fn idle(gateway: &Gateway, figure: &str, report: &mut Report) -> Result<()> {
    std::thread::sleep(IDLE);
    let memory = gateway.process.memory()?;
    report.add(Row {
        figure: figure.into(),
        measured: format!("{:.1} MB, peak {:.1} MB", memory.resident, memory.peak),
        target: Some(Target::at_most(memory.resident, 40.0, " MB")),
        ..Row::default()
    });
    Ok(())
}

/// Fills a backlog for a consumer that has gone, and restarts: after a clean stop, and after a kill.
fn backlog(plan: &Plan, data: &Path, report: &mut Report) -> Result<()> {
    note(&format!("footprint: a backlog of {}", plan.backlog));
    let gateway = Gateway::start(data)?;
    let scene = Scene::set_up(gateway.http, BULK, Some(&type_filter()))?;
    Socket::connect(gateway.http, &scene.token)?.leave()?;
    fill(plan, &gateway, &scene, report)?;
    gateway.stop()?;

    let gateway = Gateway::start(data)?;
    first_frame(plan, &gateway, &scene, "after a clean stop", report)?;
    drop(gateway);
    let gateway = Gateway::start(data)?;
    first_frame(plan, &gateway, &scene, "after a kill", report)?;
    gateway.stop()
}

fn fill(plan: &Plan, gateway: &Gateway, scene: &Scene, report: &mut Report) -> Result<()> {
    let requests = plan.backlog.div_ceil(BULK as u64);
    let load = Load {
        to: gateway.http,
        requests: &[Request::bulk(&scene.devices, "TRANSIENT")].into(),
        sent: &Arc::new(SendTimes::new()),
        in_flight: 4,
        most: requests,
        per_second: None,
        time: FILLED_WITHIN,
    };
    let posted = load.run()?;
    ensure!(posted.created == requests, "only {} of {requests} bulk requests within {FILLED_WITHIN:?}", posted.created);
    let memory = gateway.process.memory()?;
    report.add(Row {
        figure: format!("bulk POSTs of {BULK} TRANSIENT, 4 in flight"),
        measured: format!("{:.0} messages/s, then RSS {:.1} MB", posted.per_second() * BULK as f64, memory.resident),
        ..Row::default()
    });
    Ok(())
}

fn first_frame(plan: &Plan, gateway: &Gateway, scene: &Scene, how: &str, report: &mut Report) -> Result<()> {
    let came: Instant = Socket::connect(gateway.http, &scene.token)?.first_notification(FIRST_FRAME_WITHIN)?;
    let seconds = came.duration_since(gateway.spawned).as_secs_f64();
    report.add(Row {
        figure: format!("first frame of {} {how}", plan.backlog),
        measured: format!("{seconds:.3} s, ready after {:.3} s", gateway.ready_after.as_secs_f64()),
        target: Some(Target::at_most(seconds, 2.0, " s")),
        ..Row::default()
    });
    Ok(())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
