//! Allocates without end.

faulty::filter!(|_batch| {
    let mut held = Vec::new();
    loop {
        held.push(std::hint::black_box(vec![1_u8; 1 << 16]));
    }
});
