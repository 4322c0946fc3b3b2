//! Never answers.

faulty::filter!(|_batch| loop {
    std::hint::black_box(());
});
