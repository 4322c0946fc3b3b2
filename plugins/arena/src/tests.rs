#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;

/// Gives out pieces of one block, the first after a gap.
struct Block {
    memory: Box<[Cell<u64>]>,
    used: Cell<usize>,
}

const PIECE: usize = 1 << 10;

impl Block {
    fn new(bytes: usize) -> Self {
        Self { memory: vec![Cell::new(0); bytes / 8].into(), used: Cell::new(0) }
    }

    fn skip(&self, bytes: usize) {
        self.used.set(self.used.get() + bytes);
    }
}

impl Source for &Block {
    fn grow(&self, bytes: usize) -> Option<Range<*mut u8>> {
        let start = self.used.get();
        let end = start.checked_add(bytes.checked_next_multiple_of(PIECE)?)?;
        if end > self.memory.len() * 8 {
            return None;
        }
        self.used.set(end);
        let first: *mut u8 = self.memory.as_ptr().cast_mut().cast();
        Some(first.wrapping_add(start)..first.wrapping_add(end))
    }
}

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

/// An allocation whose bytes all are its mark.
struct Held {
    start: *mut u8,
    layout: Layout,
    mark: u8,
}

impl Held {
    fn new<S: Source>(arena: &Arena<S>, layout: Layout, mark: u8) -> Self {
        let start = unsafe { arena.alloc(layout) };
        assert!(!start.is_null());
        assert_eq!(start.addr() % layout.align(), 0);
        let held = Self { start, layout, mark };
        held.fill(layout.size());
        held
    }

    fn fill(&self, size: usize) {
        unsafe { self.start.write_bytes(self.mark, size) };
    }

    fn resize<S: Source>(&mut self, arena: &Arena<S>, size: usize) {
        let start = unsafe { arena.realloc(self.start, self.layout, size) };
        assert!(!start.is_null());
        (self.start, self.layout) = (start, layout(size.min(self.layout.size()), self.layout.align()));
        self.check();
        self.layout = layout(size, self.layout.align());
        self.fill(size);
    }

    fn check(&self) {
        let content = unsafe { std::slice::from_raw_parts(self.start, self.layout.size()) };
        assert!(content.iter().all(|byte| *byte == self.mark), "{:?} holds others' bytes", self.layout);
    }

    fn free<S: Source>(self, arena: &Arena<S>) {
        self.check();
        unsafe { arena.dealloc(self.start, self.layout) };
    }
}

/// Differs from run to run of `next`, not of the test.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) as usize % below
    }
}

#[test]
fn nothing_overlaps_and_calls_do_not_add_up() {
    let block = Block::new(1 << 20);
    let arena = Arena::new(&block);
    let mut numbers = Numbers(7);
    let mut settings: Vec<Held> =
        (0..9).map(|mark| Held::new(&arena, layout(1 + 7 * usize::from(mark), 8), mark)).collect();
    arena.keep();
    settings.pop().unwrap().free(&arena);
    let mut used = 0;
    for call in 0..2_000 {
        let mut held: Vec<Held> = Vec::new();
        for step in 0..60 {
            match numbers.next(4) {
                0 if !held.is_empty() => {
                    let i = numbers.next(held.len());
                    held.swap_remove(i).free(&arena);
                }
                1 if !held.is_empty() => {
                    let i = numbers.next(held.len());
                    held[i].resize(&arena, 1 + numbers.next(400));
                }
                _ => held.push(Held::new(&arena, layout(1 + numbers.next(300), 1 << numbers.next(5)), 10 + step)),
            }
        }
        held.into_iter().for_each(|held| held.free(&arena));
        settings.iter().for_each(Held::check);
        if call == 1_000 {
            used = block.used.get();
        }
    }
    assert!(used > 0 && block.used.get() < used + 8 * PIECE, "{used} became {}", block.used.get());
}

#[test]
fn the_same_call_takes_the_same_memory() {
    let block = Block::new(1 << 20);
    let arena = Arena::new(&block);
    let starts: Vec<_> = (0..3)
        .map(|_| {
            let held: Vec<_> = (0..50).map(|mark| Held::new(&arena, layout(100, 4), mark)).collect();
            let first = held[0].start;
            held.into_iter().for_each(|held| held.free(&arena));
            first
        })
        .collect();
    assert_eq!(starts[0], starts[1]);
    assert_eq!(starts[1], starts[2]);
}

#[test]
fn what_is_kept_neither_grows_nor_shrinks_into_the_calls() {
    for size in [50, 200] {
        let block = Block::new(1 << 20);
        let arena = Arena::new(&block);
        let mut kept = Held::new(&arena, layout(100, 1), 1);
        let other = Held::new(&arena, layout(30, 1), 2);
        let mut last = Held::new(&arena, layout(100, 1), 3);
        arena.keep();
        last.resize(&arena, size);
        kept.resize(&arena, size);
        let call = Held::new(&arena, layout(500, 1), 4);
        [&kept, &other, &last].into_iter().for_each(Held::check);
        call.free(&arena);
        [&kept, &other, &last].into_iter().for_each(Held::check);
    }
}

#[test]
fn the_last_allocation_grows_in_place() {
    let block = Block::new(1 << 20);
    let arena = Arena::new(&block);
    let mut held = Held::new(&arena, layout(10, 1), 1);
    let start = held.start;
    held.resize(&arena, 300);
    held.resize(&arena, 20);
    assert_eq!(held.start, start);
    assert_eq!(Held::new(&arena, layout(1, 1), 2).start, start.wrapping_add(20));
    held.resize(&arena, 21);
    assert_ne!(held.start, start);
}

#[test]
fn memory_in_several_parts() {
    let block = Block::new(1 << 20);
    let arena = Arena::new(&block);
    let below = Held::new(&arena, layout(900, 8), 1);
    block.skip(3 * PIECE);
    let above = Held::new(&arena, layout(900, 8), 2);
    below.check();
    below.free(&arena);
    above.check();
    let next = Held::new(&arena, layout(900, 8), 3);
    above.check();
    above.free(&arena);
    next.free(&arena);
}

#[test]
fn no_memory_is_no_allocation() {
    let block = Block::new(4 << 10);
    let arena = Arena::new(&block);
    let held = Held::new(&arena, layout(3 << 10, 8), 1);
    for size in [5 << 10, isize::MAX as usize - 7] {
        assert!(unsafe { arena.alloc(layout(size, 8)) }.is_null());
        assert!(unsafe { arena.realloc(held.start, held.layout, size) }.is_null());
    }
    held.free(&arena);
}
