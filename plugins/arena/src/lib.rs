//! The allocator of guests whose calls keep nothing: it hands memory out in one direction and starts over when everything
//! is free again, which is at the latest when the host has taken the answer of a call.
//!
//! On wasm32 a dependency on this crate makes it the global allocator. What outlives the calls, as settings do, is set
//! apart by [`keep`].
#![allow(unsafe_code, reason = "an allocator")]

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::ops::Range;
use std::ptr;

/// Where memory comes from.
pub trait Source {
    /// At least `bytes` of unused memory, at higher addresses than any before.
    fn grow(&self, bytes: usize) -> Option<Range<*mut u8>>;
}

/// An allocator for a single thread that frees all at once.
#[derive(Debug)]
pub struct Arena<S> {
    source: S,
    /// What lies below is kept for good.
    base: Cell<*mut u8>,
    top: Cell<*mut u8>,
    end: Cell<*mut u8>,
    /// Allocations from `base` on.
    live: Cell<usize>,
}

impl<S: Source> Arena<S> {
    /// Takes nothing from `source` yet.
    pub const fn new(source: S) -> Self {
        const NOWHERE: *mut u8 = ptr::null_mut();
        Self { source, base: Cell::new(NOWHERE), top: Cell::new(NOWHERE), end: Cell::new(NOWHERE), live: Cell::new(0) }
    }

    /// Sets what is allocated now apart from what is freed together: it stays, even if it is freed.
    pub fn keep(&self) {
        self.base.set(self.top.get());
        self.live.set(0);
    }

    /// The address for `layout`, if the memory at hand has room for it.
    fn fit(&self, layout: Layout) -> Option<*mut u8> {
        let top = self.top.get();
        let padding = top.addr().wrapping_neg() & (layout.align() - 1);
        let needed = padding.checked_add(layout.size())?;
        if needed > self.end.get().addr() - top.addr() {
            return None;
        }
        self.top.set(top.wrapping_add(needed));
        self.live.set(self.live.get() + 1);
        Some(top.wrapping_add(padding))
    }

    #[cold]
    fn grow(&self, layout: Layout) -> Option<()> {
        let more = self.source.grow(layout.size().checked_add(layout.align())?)?;
        if more.start != self.end.get() {
            // Somebody else has memory in between, so that the part so far is given up.
            self.top.set(more.start);
            self.keep();
        }
        self.end.set(more.end);
        Some(())
    }

    /// Whether the allocation that starts at `start` is the last one, and may still move its end.
    fn is_last(&self, start: *mut u8, size: usize) -> bool {
        start >= self.base.get() && start.wrapping_add(size) == self.top.get()
    }
}

// SAFETY: memory above `base` is handed out anew only when all allocations in it are freed, and never from below.
unsafe impl<S: Source> GlobalAlloc for Arena<S> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.fit(layout).or_else(|| self.grow(layout).and_then(|()| self.fit(layout))).unwrap_or(ptr::null_mut())
    }

    #[inline]
    unsafe fn dealloc(&self, start: *mut u8, _layout: Layout) {
        if start < self.base.get() {
            return;
        }
        let live = self.live.get() - 1;
        self.live.set(live);
        if live == 0 {
            self.top.set(self.base.get());
        }
    }

    #[inline]
    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let old = layout.size();
        if self.is_last(start, old) && size <= self.end.get().addr() - start.addr() {
            self.top.set(start.wrapping_add(size));
            return start;
        }
        if size <= old {
            return start;
        }
        // SAFETY: as the caller of `realloc` promises, `size` and the alignment make a layout, and `start` was allocated
        // with `layout`.
        unsafe {
            let moved = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !moved.is_null() {
                ptr::copy_nonoverlapping(start, moved, old);
                self.dealloc(start, layout);
            }
            moved
        }
    }
}

#[cfg(target_arch = "wasm32")]
pub use global::keep;

#[cfg(target_arch = "wasm32")]
mod global {
    use std::arch::wasm32::memory_grow;
    use std::ops::Range;
    use std::ptr::with_exposed_provenance_mut;

    use super::{Arena, Source};

    const PAGE: usize = 64 << 10;

    struct LinearMemory;

    impl Source for LinearMemory {
        fn grow(&self, bytes: usize) -> Option<Range<*mut u8>> {
            let pages = bytes.div_ceil(PAGE);
            let first = memory_grow::<0>(pages);
            let address = |page: usize| with_exposed_provenance_mut(page * PAGE);
            (first != usize::MAX).then(|| address(first)..address(first + pages))
        }
    }

    // SAFETY: a guest has one thread.
    unsafe impl Sync for Arena<LinearMemory> {}

    #[global_allocator]
    static GLOBAL: Arena<LinearMemory> = Arena::new(LinearMemory);

    /// Sets what is allocated now apart: it stays. To be called at the end of `configure`.
    pub fn keep() {
        GLOBAL.keep();
    }
}

#[cfg(test)]
mod tests;
