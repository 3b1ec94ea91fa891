//! Who made it: the operator and the annotation around each memory instant, on its own thread.

use super::{Instant, Kept, Span, SpanKind};

/// What was at work on the thread of an instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Around {
    /// The innermost operator.
    pub(super) operator: Option<u32>,
    /// The innermost annotation that is no step.
    pub(super) annotation: Option<u32>,
    /// Whether it is in a node of the backward pass.
    pub(super) backward: bool,
    /// Whether it is in an optimizer's step.
    pub(super) update: bool,
    /// Whether it is where an optimizer lets go of gradients.
    pub(super) zero_grad: bool,
}

impl Around {
    /// The same, inside `span` too.
    const fn within(mut self, span: &Span) -> Self {
        match span.kind {
            SpanKind::Operator => self.operator = Some(span.name),
            SpanKind::Backward => (self.operator, self.backward) = (Some(span.name), true),
            SpanKind::Annotation => self.annotation = Some(span.name),
            SpanKind::Update => (self.annotation, self.update) = (Some(span.name), true),
            SpanKind::ZeroGrad => (self.annotation, self.zero_grad) = (Some(span.name), true),
            SpanKind::Step(_) => {}
        }
        self
    }
}

/// What is around each instant of `kept`, in their order. Sorts the spans.
pub(super) fn attribute(kept: &mut Kept) -> Vec<Around> {
    // The outer one of two that begin together first.
    kept.spans.sort_by(|a, b| {
        a.thread.cmp(&b.thread).then(a.start.total_cmp(&b.start)).then(b.end.total_cmp(&a.end))
    });
    let instants: &[Instant] = &kept.instants;
    let mut order: Vec<usize> = (0..instants.len()).collect();
    order.sort_by(|a, b| {
        let (a, b) = (&instants[*a], &instants[*b]);
        a.thread.cmp(&b.thread).then(a.time.total_cmp(&b.time))
    });
    let mut found = vec![Around::default(); instants.len()];
    let (mut next, mut open): (usize, Vec<(f64, Around)>) = (0, Vec::new());
    let mut thread = None;
    for index in order {
        let instant = &instants[index];
        if thread != Some(instant.thread) {
            thread = Some(instant.thread);
            open.clear();
            next += kept.spans[next..].partition_point(|span| span.thread < instant.thread);
        }
        while let Some(span) = kept.spans.get(next)
            && span.thread == instant.thread
            && span.start <= instant.time
        {
            while open.last().is_some_and(|(end, _)| *end < span.start) {
                open.pop();
            }
            let outer = open.last().map(|(_, around)| *around).unwrap_or_default();
            open.push((span.end, outer.within(span)));
            next += 1;
        }
        while open.last().is_some_and(|(end, _)| *end < instant.time) {
            open.pop();
        }
        found[index] = open.last().map(|(_, around)| *around).unwrap_or_default();
    }
    found
}
