//! Never ends its start function.

#[cfg(target_arch = "wasm32")]
#[allow(unsafe_code, reason = "the name is what makes it the start function")]
#[unsafe(export_name = "_initialize")]
extern "C" fn start() {
    loop {
        std::hint::black_box(());
    }
}

faulty::filter!(|_batch| Vec::new());
