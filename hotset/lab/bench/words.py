"""Words for random prompts. Common tokenizers encode each of them, after a space, as one token."""

TEXT = """
about after again all also always and another any around ask away back because been before between big book both but
call can change children close come could country cut day different does down each earth end even every face family
far feet few find first five food four from full get give going good great group grow had hand hard has have head
her here high him his house how idea into its just keep kind know land large last later left let life light like
line list little live long look made make man many may mean men might more most move much must name near need never
new next night not now number off often old once one only open other our out over own page paper part people place
plant play point put question read really right run said same say sea second see seem set she should show side small
some sound start state still stop such take tell than that the their them then there these they thing think this
those thought three through time together too tree turn two under until use very want was water way well were what
when where which while white who why will with without word work world would write year you young your
"""
WORDS = tuple(TEXT.split())
