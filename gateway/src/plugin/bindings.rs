//! Rust's view of the worlds in `wit/plugin.wit` and of the script runner's own, generated. Arguments are borrowed: a batch is lowered straight from the
//! messages.
#![allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    clippy::unwrap_used,
    reason = "generated code; the WIT file is its documentation"
)]

pub(super) mod filter {
    wasmtime::component::bindgen!({
        path: "../wit",
        world: "filter",
        ownership: Borrowing { duplicate_if_necessary: true },
        imports: { default: trappable },
    });
}

pub(super) mod transform {
    wasmtime::component::bindgen!({
        path: "../wit",
        world: "transform",
        ownership: Borrowing { duplicate_if_necessary: true },
        imports: { default: trappable },
        with: {
            "tidegate:plugin/types": super::filter::tidegate::plugin::types,
            "tidegate:plugin/log": super::filter::tidegate::plugin::log,
        },
    });
}

pub(super) mod script {
    wasmtime::component::bindgen!({
        path: ["../wit", "../plugins/script-runner"],
        world: "tidegate:script-runner/script-runner",
        ownership: Borrowing { duplicate_if_necessary: true },
        imports: { default: trappable },
        with: {
            "tidegate:plugin/log": super::filter::tidegate::plugin::log,
        },
    });
}
